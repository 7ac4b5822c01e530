// A click on the heading of a long table sorts its rows, a second click the other way.
"use strict";

const SHORTEST = 12;

function value(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : Number(a > b);
  return typeof a === "number" ? -1 : 1; // Numbers before words.
}

function sort(table, column, heading) {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => (up ? 1 : -1) * compare(value(a, column), value(b, column)));
  table.tBodies[0].append(...rows);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    if (!table.tHead || table.tBodies[0].rows.length < SHORTEST) continue;
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.classList.add("sortable");
      heading.tabIndex = 0;
      heading.addEventListener("click", () => sort(table, column, heading));
      heading.addEventListener("keydown", (event) => {
        if (event.key === "Enter") sort(table, column, heading);
      });
    });
  }
});
