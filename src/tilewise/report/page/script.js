"use strict";
// Sorting, filtering and opening of rows; the page reads as well without.
(() => {
  const list = document.getElementById("rows");
  if (!list) return;
  const tools = document.getElementById("tools");
  const filter = document.getElementById("filter");
  const sort = document.getElementById("sort");
  const open = document.getElementById("open");
  const found = document.getElementById("found");
  const rows = Array.from(list.children);
  const text = (row) => (row.querySelector("summary, div").textContent + " " + (row.dataset.names || "")).toLowerCase();
  const texts = new Map(rows.map((row) => [row, text(row)]));
  const value = (row, name) => (row.dataset[name] ? Number(row.dataset[name]) : -Infinity);

  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => texts.get(row).includes(word));
      count += row.hidden ? 0 : 1;
    }
    found.textContent = words.length ? count + " of " + rows.length : "";
  };
  const order = () => {
    const name = sort.value;
    const places = new Map(rows.map((row, i) => [row, i]));
    const sorted = name === "order" ? rows : [...rows].sort((a, b) => {
      const x = value(a, name), y = value(b, name);
      return x === y ? places.get(a) - places.get(b) : y - x;
    });
    list.append(...sorted);
  };
  const reveal = () => {
    const row = /^#pass-\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    if (!row) return;
    row.hidden = false;
    (row.querySelector("details") || row.closest("details")).open = true;
    row.scrollIntoView();
  };

  tools.hidden = false;
  tools.addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("input", show);
  sort.addEventListener("change", order);
  open.addEventListener("click", () => {
    const all = Array.from(list.querySelectorAll(":scope > li:not([hidden]) > details"));
    const wanted = all.some((details) => !details.open);
    for (const details of all) details.open = wanted;
    open.textContent = wanted ? "Close all" : "Open all";
  });
  window.addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    // The same link again does not change the address, and would open nothing.
    const link = event.target.closest("a[href^='#pass-']");
    if (link && link.hash === location.hash) reveal();
  });
  // Browsers may keep what was typed when a page is loaded again.
  if (filter.value) show();
  if (sort.value !== "order") order();
  reveal();
})();
