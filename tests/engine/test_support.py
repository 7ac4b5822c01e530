"""docs/kernels.md has the tables that the programs print."""

from engine import make_support, tpu_forecast


def test_the_page_says_what_implementations_answer():
    assert make_support.table() in make_support.PAGE.read_text()


def test_the_page_says_what_the_schedule_forecasts():
    assert tpu_forecast.table() in make_support.PAGE.read_text()
    cases = tpu_forecast.read()
    assert len(cases) == 118
    for case in cases:
        least, greatest = (0.6, 0.9) if case.chip == "7x" else (0.8, 1.1)
        assert least < case.forecast() / case.ms < greatest
