// evaluation.js: the page of a run's samples: its list, sorted and filtered.
"use strict";
(() => {
  const PART = 400; // rows that are added at a time
  const find = (id) => document.getElementById(id);
  const count = (value) => Math.round(value).toLocaleString("en");

  // The list: the rows after the first ones wait in a template

  const table = find("list"),
    body = table.tBodies[0];
  const rest = find("rest");
  const all = [...body.rows, ...(rest ? rest.content.children : [])];
  const place = new Map(all.map((row, at) => [row, at]));
  let words = null; // of each row, from the first search for some
  let order = all,
    chosen = all,
    shown = body.rows.length;

  function show(least) {
    shown = Math.min(chosen.length, Math.max(PART, least));
    body.replaceChildren(...chosen.slice(0, shown));
    find("more").hidden = shown >= chosen.length;
    find("found").textContent = chosen.length === all.length ? "" : `${count(chosen.length)} of ${count(all.length)}`;
  }

  function more() {
    const next = chosen.slice(shown, shown + PART);
    body.append(...next);
    shown += next.length;
    find("more").hidden = shown >= chosen.length;
  }

  function choose() {
    const asked = find("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcome = find("outcome").value,
      wrong = find("only").checked;
    if (asked.length) words ||= all.map((row) => row.textContent.toLowerCase());
    chosen = order.filter((row) => {
      if (wrong && row.className === "right") return false;
      if (outcome && !row.dataset.outcome.split("|").includes(outcome)) return false;
      return asked.every((word) => words[place.get(row)].includes(word));
    });
    show(PART);
  }

  const collator = new Intl.Collator(undefined, { numeric: true });
  for (const name of table.querySelectorAll("th button"))
    name.addEventListener("click", () => {
      const head = name.parentNode,
        column = head.cellIndex,
        number = head.className === "n";
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = all.map((row) => {
        const text = row.cells[column].textContent;
        return [row, number ? parseFloat(text.replaceAll(",", "")) : text];
      });
      keyed.sort(number ? (a, b) => a[1] - b[1] : (a, b) => collator.compare(a[1], b[1]));
      if (down) keyed.reverse();
      order = keyed.map(([row]) => row);
      choose();
    });
  find("find").addEventListener("input", choose);
  find("outcome").addEventListener("change", choose);
  find("only").addEventListener("change", choose);
  find("more").addEventListener("click", more);
  const near = () => !find("more").hidden && find("more").getBoundingClientRect().top < innerHeight + 600;
  window.addEventListener("scroll", () => near() && more(), { passive: true });

  // Files of what is shown: tables as CSV, plots as SVG

  function save(name, type, text) {
    const link = document.createElement("a"),
      address = URL.createObjectURL(new Blob([text], { type }));
    link.href = address;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  function button(text, name, type, made) {
    const pressed = document.createElement("button");
    pressed.type = "button";
    pressed.className = "save";
    pressed.textContent = text;
    pressed.addEventListener("click", () => save(name, type, made()));
    return pressed;
  }

  /** Rows as CSV; a cell that a spreadsheet would read as a formula begins with an apostrophe. */
  const csv = (rows) =>
    rows
      .map((row) =>
        [...row.cells]
          .map((cell) => {
            const parts = [...cell.childNodes].map((part) => part.textContent).join(" ");
            const words = parts.trim().replace(/\s+/g, " ");
            const safe = /^[=@\t]|^[+-](?![\d.])/.test(words) ? `'${words}` : words;
            return `"${safe.replaceAll('"', '""')}"`;
          })
          .join(","),
      )
      .join("\r\n") + "\r\n";

  const PAINT = ["fill", "stroke", "stroke-width", "font-family", "font-size", "text-anchor", "opacity"];

  /** A plot as a file of its own: its colours and letters no longer come from the page. */
  function svg(figure) {
    const drawn = figure.querySelector("svg"),
      copy = drawn.cloneNode(true);
    const parts = [...copy.querySelectorAll("*")];
    drawn.querySelectorAll("*").forEach((part, at) => {
      const style = getComputedStyle(part);
      for (const name of PAINT) parts[at].setAttribute(name, style.getPropertyValue(name));
    });
    const [, , wide, tall] = drawn.getAttribute("viewBox").split(" ").map(Number);
    const items = [...figure.querySelectorAll(".legend li")].map((item) => item.textContent);
    const text = (words, x, y, weight) => {
      const line = document.createElementNS(copy.namespaceURI, "text");
      line.textContent = words;
      for (const [name, value] of Object.entries({ x, y, "font-weight": weight, "font-size": 11, fill: "currentColor" }))
        line.setAttribute(name, value);
      line.setAttribute("font-family", "sans-serif");
      copy.append(line);
    };
    text(figure.querySelector("figcaption").textContent, 8, -8, 600);
    figure.querySelectorAll(".legend li svg").forEach((mark, at) => {
      const shape = mark.firstElementChild.cloneNode(true);
      shape.setAttribute("fill", getComputedStyle(mark.firstElementChild).color);
      shape.setAttribute("transform", `translate(8 ${tall + 4 + 16 * at})`);
      shape.querySelectorAll("*").forEach((part) => part.removeAttribute("class"));
      copy.append(shape);
      text(items[at], 28, tall + 14 + 16 * at, 400);
    });
    const page = getComputedStyle(document.body);
    copy.setAttribute("xmlns", copy.namespaceURI);
    copy.setAttribute("viewBox", `0 -24 ${wide} ${tall + 32 + 16 * items.length}`);
    copy.setAttribute("style", `color:${page.color};background:${page.backgroundColor}`);
    return new XMLSerializer().serializeToString(copy);
  }

  const CSV = "text/csv;charset=utf-8";
  document.querySelector(".tools").append(
    button("Save as CSV", "samples.csv", CSV, () => csv([table.tHead.rows[0], ...chosen])),
  );
  for (const arms of document.querySelectorAll("table.arms"))
    arms.parentNode.after(button("Save as CSV", "arms.csv", CSV, () => csv([...arms.rows])));
  document.querySelectorAll("figure.plot").forEach((figure, at) => {
    figure.append(button("Save as SVG", `plot-${at + 1}.svg`, "image/svg+xml", () => svg(figure)));
  });

  find("more").hidden = shown >= all.length;
  document.documentElement.dataset.ready = "1";
})();
