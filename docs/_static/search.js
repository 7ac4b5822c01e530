// Excerpts of search results begin at the article: the theme's menus are in role="main", too.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // Not the page of results.
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) =>
    textOf(html.replace('role="main"', "").replace("<article", '<article role="main"'), anchor);
});
