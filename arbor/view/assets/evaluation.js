// evaluation.js: the page of a run's samples: its list, sorted and filtered, and the run over time.
"use strict";
(() => {
  const PART = 400; // rows that are added at a time
  const EDGE = { left: 70, right: 16 }; // CSS pixels
  const POOL_TALL = 84,
    LANES_TALL = 120,
    NEAR = 3;
  const find = (id) => document.getElementById(id);
  const count = (value) => Math.round(value).toLocaleString("en");
  const seconds = (value) =>
    value < 90 ? `${value.toFixed(1)} s` : value < 5400 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;

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
    if (draw) draw();
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

  // The run over time: slots of all searches above, the samples in progress below

  const run = find("run");
  let draw = null;
  if (run) timeline(JSON.parse(run.dataset.run));

  function timeline({ seconds: end, used, budget, bars, pauses_s: pauses }) {
    const canvas = find("times"),
      at = find("at"),
      whole = find("whole");
    const link = document.createElement("a");
    link.id = "bar";
    link.tabIndex = 0; // a search without a page has no address
    link.draggable = false;
    canvas.after(link);
    const lanes = bars.reduce((most, bar) => Math.max(most, bar[3] + 1), 1);
    const tall = Math.max(2, Math.min(14, Math.floor(LANES_TALL / lanes)));
    const height = POOL_TALL + 10 + tall * lanes + 18;
    canvas.style.height = `${height}px`;
    const highest = Math.max(1, ...used),
      limit = Math.max(...budget);
    const top = limit > 1.6 * highest ? highest * 1.15 : Math.max(highest, limit) * 1.08;
    const byLane = Array.from({ length: lanes }, () => []);
    for (const bar of bars) byLane[bar[3]].push(bar); // in the order of their beginnings
    let from = 0,
      to = end,
      wide = 1,
      current = 0,
      held = null;

    const x = (time) => EDGE.left + ((time - from) / (to - from)) * wide;
    const timeAt = (left) => from + (Math.min(wide, Math.max(0, left - EDGE.left)) / wide) * (to - from);
    const y = (slots) => POOL_TALL - (POOL_TALL - 12) * Math.min(1.05, slots / top);
    const binAt = (time) => Math.min(used.length - 1, Math.max(0, Math.floor((time / end) * used.length)));

    draw = () => {
      const box = canvas.getBoundingClientRect(),
        ratio = window.devicePixelRatio || 1,
        style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(`--${name}`).trim();
      wide = Math.max(1, box.width - EDGE.left - EDGE.right);
      canvas.width = Math.round(box.width * ratio);
      canvas.height = Math.round(height * ratio);
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      pen.fillStyle = colour("idle");
      for (let pixel = 0; pixel < wide; pixel++) {
        const first = binAt(timeAt(EDGE.left + pixel)),
          last = Math.max(first, binAt(timeAt(EDGE.left + pixel + 1)) - 1);
        let most = 0;
        for (let bin = first; bin <= last; bin++) most = Math.max(most, used[bin]);
        pen.fillRect(EDGE.left + pixel, y(most), 1, POOL_TALL - y(most));
      }
      pen.fillStyle = colour("budget");
      pen.textAlign = "left";
      if (limit > top) pen.fillText(`budget ${count(limit)} ↑`, EDGE.left + 4, 8);
      else {
        pen.beginPath();
        pen.strokeStyle = colour("budget");
        pen.lineWidth = 1.5;
        for (let pixel = 0; pixel <= wide; pixel++) {
          const level = Math.round(y(budget[binAt(timeAt(EDGE.left + pixel))])) + 0.5;
          if (pixel) pen.lineTo(EDGE.left + pixel, level);
          else pen.moveTo(EDGE.left, level);
        }
        pen.stroke();
        const level = y(budget[binAt(from)]);
        pen.fillText(`budget ${count(budget[binAt(from)])}`, EDGE.left + 4, level < 14 ? level + 8 : level - 8);
      }
      pen.fillStyle = colour("line");
      pen.fillRect(EDGE.left, POOL_TALL, wide, 1);
      pen.fillStyle = colour("ink");
      pen.textAlign = "right";
      pen.fillText(`up to ${count(highest)}`, EDGE.left + wide - 4, Math.max(8, y(highest) - 7));
      pen.fillStyle = colour("muted");
      pen.textAlign = "right";
      pen.fillText("KV slots", EDGE.left - 8, 12);
      pen.fillText("0", EDGE.left - 8, POOL_TALL - 3);
      pen.fillText("samples", EDGE.left - 8, POOL_TALL + 10 + tall / 2);
      const fills = { right: colour("active"), wrong: colour("host"), none: colour("edge") };
      const seen = new Set(chosen.length === all.length ? [] : chosen.map((row) => place.get(row)));
      for (const [row, start, length, lane] of bars) {
        const left = x(start),
          right = x(start + length);
        if (right < EDGE.left || left > EDGE.left + wide) continue;
        pen.globalAlpha = seen.size && !seen.has(row) ? 0.2 : 1;
        pen.fillStyle = fills[outcomeOf(row)];
        const begin = Math.max(EDGE.left, left),
          size = Math.min(EDGE.left + wide, right) - begin;
        pen.fillRect(begin, POOL_TALL + 10 + lane * tall, Math.max(0.5, size > 3 ? size - 1 : size), tall - (tall > 3 ? 1 : 0));
      }
      pen.globalAlpha = 1;
      pen.fillStyle = colour("muted");
      for (const pause of pauses)
        if (pause > from && pause < to)
          for (let dash = 0; dash < height - 18; dash += 6) pen.fillRect(x(pause), dash, 1, 3);
      const foot = height - 8;
      pen.textAlign = "left";
      pen.fillText(seconds(from), EDGE.left, foot);
      pen.textAlign = "right";
      pen.fillText(seconds(to), EDGE.left + wide, foot);
      if (held) {
        pen.globalAlpha = 0.25;
        pen.fillStyle = colour("pick");
        pen.fillRect(x(Math.min(...held)), 0, Math.abs(x(held[1]) - x(held[0])), POOL_TALL);
        pen.globalAlpha = 1;
      }
      whole.hidden = from === 0 && to === end;
      point(current, false);
    };

    const outcomeOf = (row) => {
      const shape = all[row];
      if (!shape || shape.className === "right") return "right";
      return shape.dataset.outcome.split("|")[0] === "wrong" ? "wrong" : "none";
    };

    /** Puts the link over a bar; `says` also describes it. */
    function point(number, says = true) {
      const bar = bars[number];
      if (!bar) return;
      current = number;
      const [row, start, length, lane] = bar,
        target = all[row] && all[row].querySelector("a");
      const left = Math.min(EDGE.left + wide, Math.max(EDGE.left, x(start))),
        right = Math.min(EDGE.left + wide, Math.max(left, x(start + length)));
      const size = Math.max(right - left, 2 * NEAR);
      link.style.left = `${(left + right - size) / 2}px`;
      link.style.width = `${size}px`;
      link.style.top = `${POOL_TALL + 10 + lane * tall}px`;
      link.style.height = `${tall}px`;
      if (target) link.href = target.getAttribute("href");
      else link.removeAttribute("href");
      if (!all[row]) return;
      const cells = all[row].cells;
      const text = `${cells[0].textContent}: ${cells[4].textContent}, ${seconds(length)} from ${seconds(start)}, peak ${cells[7].textContent} slots · ${cells[1].textContent}`;
      link.setAttribute("aria-label", text);
      if (says) at.textContent = text;
    }

    /** The bar at a point, or one next to it. */
    function barAt(left, top) {
      const lane = Math.floor((top - POOL_TALL - 10) / tall);
      const row = byLane[lane];
      if (!row) return -1;
      const time = timeAt(left);
      let low = 0,
        high = row.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (row[middle][1] <= time) low = middle + 1;
        else high = middle;
      }
      let best = -1,
        nearest = NEAR;
      for (const bar of row.slice(Math.max(0, low - 1), low + 1)) {
        const off = Math.max(x(bar[1]) - left, left - x(bar[1] + bar[2]), 0);
        if (off <= nearest) {
          nearest = off;
          best = bars.indexOf(bar);
        }
      }
      return best;
    }

    const spot = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointermove", (event) => {
      const [left, top] = spot(event);
      if (held) {
        held[1] = timeAt(left);
        draw();
        return;
      }
      const number = barAt(left, top);
      if (number >= 0) return point(number);
      const time = timeAt(left),
        going = bars.filter((bar) => bar[1] <= time && time < bar[1] + bar[2]).length;
      const bin = binAt(time);
      at.textContent = `${seconds(time)}: up to ${count(used[bin])} of ${count(budget[bin])} slots, ${going} in progress`;
    });
    canvas.addEventListener("pointerdown", (event) => {
      const [left, top] = spot(event);
      if (top > POOL_TALL) return;
      canvas.setPointerCapture(event.pointerId);
      held = [timeAt(left), timeAt(left)];
    });
    canvas.addEventListener("pointerup", () => {
      if (!held) return;
      const [low, high] = [Math.min(...held), Math.max(...held)];
      held = null;
      if (((high - low) / (to - from)) * wide > NEAR) [from, to] = [low, high];
      draw();
    });
    canvas.addEventListener("pointercancel", () => {
      held = null;
      draw();
    });
    whole.addEventListener("click", () => {
      [from, to] = [0, end];
      draw();
    });
    link.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      event.preventDefault();
      point(Math.min(bars.length - 1, Math.max(0, current + step)));
    });
    link.addEventListener("focus", () => point(current));
    window.addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  }

  find("more").hidden = shown >= all.length;
  document.documentElement.dataset.ready = "1";
})();
