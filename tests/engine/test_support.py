"""docs/kernels.md has the tables that the programs print."""

from engine import make_support, tpu_forecast


def test_the_page_says_what_implementations_answer():
    assert make_support.table() in make_support.PAGE.read_text()


def test_the_page_says_what_the_schedule_forecasts():
    assert tpu_forecast.table() in make_support.PAGE.read_text()
    ratios = [case.forecast() / case.ms for case in tpu_forecast.read()]
    assert len(ratios) == 71 and 0.8 < min(ratios) and max(ratios) < 1.1
