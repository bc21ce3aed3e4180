// viewer.js: one view over one or two runs: its position, what moves it, and the drawing after a move.

const KEYS = [
  ["space", "play, pause"],
  ["← →", "one event; with shift fifty"],
  ["Home End", "first, last event"],
  ["p P", "next, previous pressure"],
  ["r R", "next, previous rehydration"],
  ["b B", "next, previous backtrack"],
  ["h l", "parent, first child"],
  ["j k", "next, previous sibling"],
  ["a", "the answer's block"],
  ["n N", "next, previous block found"],
  ["/", "find blocks: #12, words, v>0.7, pruned, running, tier:gone"],
  ["m", "spans, icicle, links"],
  ["f", "show the whole tree"],
  ["+ −", "zoom"],
  ["x", "axis: events, seconds, blocks"],
  ["c", "the other run, where two are compared"],
  ["1 … 8", "panels"],
  ["d", "light, dark"],
  ["?", "this list"],
];
const PATH = 1; // its panel
const MODES = ["spans", "icicle", "links"];
const AXES = ["event", "time", "blocks"];
const WHOLE_RUN_S = 24; // playing at 1x
const FEWEST_A_SECOND = 2.5; // events, where a run is short

class View {
  constructor(runs) {
    this.both = runs.length > 1;
    this.active = 0;
    this.axis = this.both ? "blocks" : "event";
    this.mode = "spans";
    this.filter = "";
    this.hover = -1;
    this.hosted = runs.some((run) => run.hostAt.some((tokens) => tokens > 0));
    this.panes = runs.map((run, place) => this._pane(run, place));
    this.panels = [
      new BlockPanel(this),
      new PathPanel(this),
      new EventPanel(this),
      new RegretPanel(this),
      new AnswerPanel(this),
      new TablePanel(this),
      new RunPanel(this),
    ];
    if (this.both) this.panels.push(new ComparePanel(this));
    this.panel = this.both ? this.panels.length - 1 : runs[0].prose ? PATH : 0;
    this._head();
    this._tabs();
    this._bars();
    this._pointersAndKeys();
    this.setAxis(this.axis);
    const needs = this.panes.map(({ strip }) => strip.needs);
    for (const { strip } of this.panes)
      strip.setScale(Math.max(...needs.map(({ peak }) => peak)), Math.max(...needs.map(({ full }) => full)));
    this.setTheme(document.documentElement.dataset.theme, false);
    const moments = runs.map((run, place) => ({ ...openingMoment(run), place }));
    this.opening = moments.reduce((most, each) => (each.rank > most.rank ? each : most));
    this.activate(this.opening.place);
    this.seek(this.opening.event, this.opening.place);
    for (const pane of this.panes) pane.run.seek(pane.state, pane.event);
    this.readHash();
    if (!/[#&]n=/.test(location.hash)) for (const pane of this.panes) this._selectOpened(pane);
  }

  /** The block that is selected at the end: the answer's, or the prompt; -1 without blocks. */
  _answered(run) {
    const answer = run.answer ? run.blockOf(run.answer.node) : -1;
    return answer >= 0 ? answer : run.count ? 0 : -1;
  }

  /** Where the selected block is not opened yet, the deepest one that the event names or that runs is selected. */
  _selectOpened(pane) {
    const { run, state } = pane;
    const born = (block) => block >= 0 && block < run.count && state.state[block] !== UNBORN;
    if (born(pane.selected)) return;
    const running = run.running(pane.event).map((id) => run.blockOf(id));
    const named = [...this._touched(pane), ...running, 0].filter(born);
    pane.selected = named.reduce((most, block) => (run.depth[block] > run.depth[most] ? block : most), named[0] ?? -1);
  }

  _pane(run, place) {
    const pane = {
      run,
      place,
      event: run.events - 1,
      state: new State(run.count),
      selected: -1,
      found: null,
    };
    pane.selected = this._answered(run);
    pane.map = new TreeMap(run, {
      select: (block) => {
        this.activate(place);
        this.select(block, true);
      },
      hover: (block, x, y) => this._hoverBlock(pane, block, x, y),
      moved: () => this.invalidate(),
    });
    pane.strip = new Strip(run, this.both ? 64 : 92, {
      seek: (event) => {
        this.pause();
        this.seek(event, place);
      },
      hover: (event, x, y) => this._hoverEvent(pane, event, x, y),
    });
    return pane;
  }

  get current() {
    return this.panes[this.active];
  }

  /** The state of a pane; everything that draws reads only this. */
  scene(pane = this.current) {
    return {
      run: pane.run,
      state: pane.state,
      event: pane.event,
      selected: pane.selected,
      hover: this.hovered === pane ? this.hover : -1,
      found: pane.found,
      dimmed: pane.found !== null,
      touched: this._touched(pane),
      theme: this.theme,
      colours: this.colours,
      hatch: this.hatch,
      bold: `600 11px ${MONOSPACE}`,
      small: "10px system-ui, sans-serif",
      glyph: this.glyph,
    };
  }

  /** Blocks that the current event is about, unless it is about all of them. */
  _touched(pane) {
    const record = pane.run.records[pane.event];
    if (record.e === "answer") return [];
    const blocks = named(record)
      .map((id) => pane.run.blockOf(id))
      .filter((block) => block >= 0);
    return blocks.length > 400 ? [] : blocks;
  }

  // Moving

  seek(event, place = this.active) {
    const pane = this.panes[place];
    pane.event = Math.max(0, Math.min(pane.run.events - 1, event));
    pane.run.seek(pane.state, pane.event);
    for (const other of this.panes) {
      if (other === pane) continue;
      other.event =
        pane.event === pane.run.events - 1
          ? other.run.events - 1
          : other.run.eventLike(this.axis, pane.run, pane.event);
      other.run.seek(other.state, other.event);
    }
    this._findAgain(/[:v<>=]|running|open|closed|terminal|pruned/.test(this.filter));
    this.invalidate();
  }

  jump(events, back) {
    const at = before(events, this.current.event + (back ? 0 : 1));
    const to = back ? events[at - 1] : events[at];
    if (to !== undefined) this.seek(to);
    return to !== undefined;
  }

  select(block, quiet = false) {
    if (block < 0) return;
    this.current.selected = block;
    if (!quiet) this.current.map.reveal(block);
    if (!this.panels[this.panel].lists) this.show(0);
    this.invalidate();
  }

  walk(key) {
    const { run, selected } = this.current;
    if (selected < 0) return this.select(run.count ? 0 : -1);
    const family = run.parent[selected] < 0 ? [selected] : run.children[run.parent[selected]];
    const place = family.indexOf(selected);
    const to = {
      h: run.parent[selected],
      l: run.children[selected][0] ?? -1,
      j: family[place + 1] ?? -1,
      k: family[place - 1] ?? -1,
    }[key];
    return this.select(to);
  }

  activate(place) {
    if (place === this.active || !this.panes[place]) return;
    this.active = place;
    this._jumps();
    this.panes.forEach((pane, each) => pane.frame.classList.toggle("active", each === place));
    this.invalidate();
  }

  // Playing

  play() {
    if (this.playing) return this.pause();
    const { run, event } = this.current;
    if (event >= run.events - 1) this.seek(0);
    this.playing = true;
    this._playButton();
    let then = performance.now();
    let place = run.axes[this.axis][this.current.event];
    const end = run.axes[this.axis][run.events - 1] || 1;
    const step = (now) => {
      if (!this.playing) return;
      const speed = Number(find("speed").value),
        pace = Math.max(end / WHOLE_RUN_S, (FEWEST_A_SECOND * end) / run.events);
      place += ((now - then) / 1000) * pace * speed;
      then = now;
      if (this.current.run !== run || place >= end) {
        if (this.current.run === run) this.seek(run.events - 1);
        return this.pause();
      }
      const to = run.eventAt(this.axis, place);
      if (to !== this.current.event) this.seek(to);
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this._playButton();
    this.invalidate();
  }

  _playButton() {
    const button = find("play");
    button.textContent = this.playing ? "❚❚" : "▶";
    button.setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  // How it is shown

  setTheme(theme, keep = true) {
    this.theme = document.documentElement.dataset.theme = theme;
    if (keep)
      try {
        localStorage.setItem("arbor-theme", theme);
      } catch {
        /* a frame without an origin */
      }
    this.colours = palette();
    const pen = document.createElement("canvas").getContext("2d");
    this.hatch = hatch(pen, this.colours);
    pen.font = `11px ${MONOSPACE}`;
    this.glyph = pen.measureText("0").width;
    this.invalidate();
  }

  setMode(mode) {
    this.mode = mode;
    for (const pane of this.panes) pane.map.setMode(mode);
    for (const button of document.querySelectorAll("[data-mode]"))
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    this.invalidate();
  }

  setAxis(axis) {
    this.axis = find("axis").value = axis;
    const end = Math.max(...this.panes.map(({ run }) => run.axes[axis][run.events - 1]));
    this.axisEnd = end || 1;
    for (const pane of this.panes) pane.strip.setAxis(axis, end);
    this.invalidate();
  }

  show(panel) {
    if (!this.panels[panel]) return;
    this.panel = panel;
    this.tabs.forEach((tab, place) => {
      tab.setAttribute("aria-selected", String(place === panel));
      tab.tabIndex = place === panel ? 0 : -1;
    });
    this.panels.forEach((each, place) => {
      each.body.hidden = place !== panel;
    });
    this.invalidate();
  }

  setFilter(filter) {
    this.filter = filter;
    this._findAgain(true);
    this.invalidate();
  }

  _findAgain(needed) {
    if (!needed) return;
    for (const pane of this.panes) {
      const found = matches(pane.run, pane.state, this.filter);
      pane.hits = found;
      pane.found = found && new Uint8Array(pane.run.count);
      for (const block of found || []) pane.found[block] = 1;
    }
    const { hits } = this.current;
    find("found").textContent = hits ? count(hits.length) : "";
  }

  nextFound(back) {
    const { hits, selected } = this.current;
    if (!hits || !hits.length) return;
    const at = before(hits, selected + (back ? 0 : 1));
    this.select(back ? hits[(at - 1 + hits.length) % hits.length] : hits[at % hits.length]);
  }

  // Building

  _head() {
    const [{ run }] = this.panes,
      { header } = run;
    const name = (spec) => (spec && typeof spec === "object" ? spec.name : spec);
    const config = header.config || {};
    const problem = line(header.problem) || run.name;
    document.title = `${problem} · arbor`;
    find("problem").textContent = problem;
    const facts = [header.task, (header.model || {}).id, name(config.controller), name(config.verifier)]
      .filter(Boolean)
      .map(String);
    if (!this.both) facts.push(...this._cost(run));
    find("facts").replaceChildren(...facts.map((each) => make("span", {}, each)));
    const { answer } = run;
    find("outcome").replaceChildren(
      ...(answer && (answer.text || (answer.text === undefined && answer.node !== null))
        ? [
            make("span", { class: "answer" }, `${wordsOr(answer.text, "")}${answer.guessed ? " (guessed)" : ""}`),
            answer.correct === true
              ? make("span", { class: "verdict" }, "✓ correct")
              : answer.correct === false
                ? make("span", { class: "verdict wrong" }, "✗ wrong")
                : "",
          ]
        : [make("span", { class: "verdict wrong" }, run.end ? "no answer" : "not finished")]),
    );
    const banners = this.panes
      .filter((pane) => pane.run.banner)
      .map((pane) => `${this.both ? `${pane.run.name}: ` : ""}${pane.run.banner}`);
    find("banner").textContent = banners.join(" · ");
    find("banner").hidden = !banners.length;
    this.panes.forEach((pane, place) => {
      const title = this.both
        ? make(
            "p",
            { class: "pane-title" },
            make("b", {}, "AB"[place]),
            ` ${pane.run.name}`,
            make("small", {}, this._cost(pane.run).join(" · ")),
          )
        : null;
      pane.frame = make(
        "div",
        { class: `frame ${place === 0 ? "active" : ""}` },
        ...(title ? [title] : []),
        pane.map.pane,
      );
      find("maps").append(pane.frame);
      if (this.both) pane.strip.pane.prepend(make("b", { class: "strip-title" }, "AB"[place]));
      find("times").append(pane.strip.pane);
    });
    const entry = (kind, text) => make("li", { class: kind }, make("i", { "aria-hidden": "true" }), text);
    find("legend").replaceChildren(
      entry("active", "running"),
      entry("idle", "on device"),
      ...(this.hosted ? [entry("host", "on host")] : []),
      entry("gone", "gone"),
      entry("value", "value"),
      entry("path", "answer"),
    );
    find("keys").replaceChildren(
      make("h2", {}, "Keys"),
      make(
        "dl",
        {},
        ...KEYS.map(([keys, what]) => [
          make("dt", {}, ...keys.split(" ").map((key) => make("kbd", {}, key))),
          make("dd", {}, what),
        ]).flat(),
      ),
      make(
        "p",
        { class: "hint" },
        "The wheel zooms rows, with shift tokens, a pinch both; a drag pans, a click selects, a double click shows one subtree. The address holds event and block: copy it to share this view.",
      ),
      make("form", { method: "dialog" }, make("button", {}, "close")),
    );
  }

  /** Budget and cost of a run, in a few words. */
  _cost(run) {
    const metrics = (run.end && run.end.metrics) || {},
      parts = [];
    if (run.budget) parts.push(`budget ${plural(run.budget, "token")}`);
    parts.push(plural(Math.max(0, run.count - 1), "block"));
    if (Number.isFinite(metrics.wall_s)) parts.push(seconds(metrics.wall_s));
    if (metrics.rehydrations)
      parts.push(
        `${plural(metrics.rehydrations, "rehydration")}, ${plural(metrics.tokens_recomputed, "token")} recomputed`,
      );
    return parts;
  }

  _tabs() {
    this.tabs = this.panels.map((panel, place) => {
      panel.body.id = `panel-${place}`;
      panel.body.setAttribute("role", "tabpanel");
      panel.body.setAttribute("aria-labelledby", `tab-${place}`);
      find("panels").append(panel.body);
      return make(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${place}`,
          "aria-controls": `panel-${place}`,
          on: { click: () => this.show(place) },
        },
        panel.name,
      );
    });
    find("tabs").replaceChildren(...this.tabs);
    find("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      this.show((this.panel + step + this.panels.length) % this.panels.length);
      this.tabs[this.panel].focus();
    });
    this.show(this.panel);
  }

  _jumps() {
    const { run } = this.current;
    const kinds = [
      ["pressure", "p", run.ofType("pressure")],
      ["rehydrate", "r", run.ofType("rehydrate")],
      ["backtrack", "b", run.backtracks],
    ];
    find("jumps").replaceChildren(
      ...kinds.map(([name, key, events]) =>
        make(
          "span",
          { class: "jump" },
          make(
            "button",
            {
              type: "button",
              title: `Previous ${name} (${key.toUpperCase()})`,
              "aria-label": `Previous ${name}`,
              disabled: !events.length,
              on: { click: () => this.jump(events, true) },
            },
            "‹",
          ),
          make("span", {}, name, make("small", {}, count(events.length))),
          make(
            "button",
            {
              type: "button",
              title: `Next ${name} (${key})`,
              "aria-label": `Next ${name}`,
              disabled: !events.length,
              on: { click: () => this.jump(events, false) },
            },
            "›",
          ),
        ),
      ),
    );
  }

  _bars() {
    this._jumps();
    const on = (id, action) => find(id).addEventListener("click", action);
    for (const button of document.querySelectorAll("[data-mode]"))
      button.addEventListener("click", () => this.setMode(button.dataset.mode));
    on("fit", () => this.fit());
    on("first", () => this.seek(0));
    on("last", () => this.seek(this.current.run.events - 1));
    on("to-end", () => {
      this.seek(this.current.run.events - 1);
      this.current.selected = this._answered(this.current.run);
    });
    on("back", () => this.seek(this.current.event - 1));
    on("next", () => this.seek(this.current.event + 1));
    on("play", () => this.play());
    on("theme", () => this.setTheme(this.theme === "dark" ? "light" : "dark"));
    on("help", () => find("keys").showModal());
    on("skip", (event) => {
      event.preventDefault();
      find("side").focus();
    });
    find("axis").addEventListener("change", (event) => this.setAxis(event.target.value));
    find("filter").addEventListener("input", (event) => this.setFilter(event.target.value));
    find("slider").addEventListener("input", (event) => {
      this.pause();
      this.seek(this.current.run.eventAt(this.axis, Number(event.target.value) * this.axisEnd));
    });
  }

  fit() {
    for (const pane of this.panes) pane.map.fit();
    this.invalidate();
  }

  _pointersAndKeys() {
    addEventListener("resize", () => this.invalidate());
    addEventListener("hashchange", () => this.readHash());
    addEventListener("keydown", (event) => this._key(event));
    let asked = "light";
    addEventListener("beforeprint", () => {
      asked = this.theme;
      this.setTheme("light", false);
      this.draw();
    });
    addEventListener("afterprint", () => this.setTheme(asked, false));
    if (typeof ResizeObserver === "function")
      new ResizeObserver(() => this.invalidate()).observe(find("maps"));
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || find("keys").open) return;
    const { target, key } = event;
    if (target.matches("input[type=search], input[type=number], select, textarea")) {
      if (key === "Escape") target.blur();
      if (key === "Enter" && target.id === "filter") this.nextFound(event.shiftKey);
      return;
    }
    if (key === " " && target.matches("button, a")) {
      if (target.matches(":focus-visible")) return; // reached by keyboard: space presses it
      target.blur(); // clicked before: space plays
    }
    if (["Home", "End"].includes(key) && target.matches(".scroller, pre")) return;
    const { run } = this.current;
    const actions = {
      " ": () => this.play(),
      ArrowRight: () => this.seek(this.current.event + (event.shiftKey ? 50 : 1)),
      ArrowLeft: () => this.seek(this.current.event - (event.shiftKey ? 50 : 1)),
      Home: () => this.seek(0),
      End: () => this.seek(run.events - 1),
      h: () => this.walk("h"),
      j: () => this.walk("j"),
      k: () => this.walk("k"),
      l: () => this.walk("l"),
      p: () => this.jump(run.ofType("pressure"), false),
      P: () => this.jump(run.ofType("pressure"), true),
      r: () => this.jump(run.ofType("rehydrate"), false),
      R: () => this.jump(run.ofType("rehydrate"), true),
      b: () => this.jump(run.backtracks, false),
      B: () => this.jump(run.backtracks, true),
      a: () => this.select(run.answer ? run.blockOf(run.answer.node) : -1),
      n: () => this.nextFound(false),
      N: () => this.nextFound(true),
      f: () => this.fit(),
      m: () => this.setMode(MODES[(MODES.indexOf(this.mode) + 1) % MODES.length]),
      x: () => this.setAxis(AXES[(AXES.indexOf(this.axis) + 1) % AXES.length]),
      c: () => this.activate((this.active + 1) % this.panes.length),
      d: () => this.setTheme(this.theme === "dark" ? "light" : "dark"),
      "+": () => this._zoom(1.3),
      "=": () => this._zoom(1.3),
      "-": () => this._zoom(1 / 1.3),
      "/": () => find("filter").focus(),
      "?": () => find("keys").showModal(),
      Escape: () => {
        find("filter").value = "";
        this.setFilter("");
      },
    };
    const action = actions[key] || (/^[1-8]$/.test(key) ? () => this.show(Number(key) - 1) : null);
    if (!action) return;
    event.preventDefault();
    if (key !== " ") this.pause();
    action();
  }

  _zoom(factor) {
    const { map } = this.current,
      box = map.canvas.getBoundingClientRect();
    map.zoom(factor, box.width / 2, box.height / 2);
    this.invalidate();
  }

  // Pointing

  _hoverBlock(pane, block, x, y) {
    if (this.hover === block && this.hovered === pane && block < 0) return;
    this.hover = block;
    this.hovered = pane;
    const { run, state } = pane;
    this._tip(
      block < 0
        ? null
        : [
            make("b", {}, `#${run.id[block]} `),
            line(run.text(block)).slice(0, 160),
            make(
              "div",
              {},
              `${count(state.device[block])} of ${count(state.tokens[block])} tokens on the device${Number.isFinite(state.value[block]) ? `, value ${fixed(state.value[block])}` : ""}, ${STATES[state.state[block]]}`,
            ),
          ],
      x,
      y,
    );
    this.invalidate();
  }

  _hoverEvent(pane, event, x, y) {
    const { run } = pane;
    this._tip(
      event < 0
        ? null
        : [
            make("b", {}, `event ${count(event)} · ${run.records[event].e} `),
            make("div", {}, sentence(run.records[event]).slice(0, 200)),
            make(
              "div",
              {},
              `device ${count(run.deviceAt[event])} (${count(run.activeAt[event])} running)${run.shares ? `, all problems ${count(run.poolAt[event])}` : ""}, ${seconds(run.axes.time[event])}`,
            ),
          ],
      x,
      y,
    );
  }

  _tip(inside, x, y) {
    const tip = find("tip");
    tip.hidden = !inside;
    if (!inside) return;
    tip.replaceChildren(...inside);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  }

  // The address

  readHash() {
    const asked = new URLSearchParams(location.hash.slice(1)),
      number = (key) => (/^\d+$/.test(asked.get(key) || "") ? Number(asked.get(key)) : -1);
    if (/^(light|dark)$/.test(asked.get("theme") || "") && asked.get("theme") !== this.theme)
      this.setTheme(asked.get("theme"), false);
    if (MODES.includes(asked.get("m")) && asked.get("m") !== this.mode) this.setMode(asked.get("m"));
    if (AXES.includes(asked.get("x")) && asked.get("x") !== this.axis) this.setAxis(asked.get("x"));
    if (number("t") >= 0) this.activate(number("t"));
    if (number("e") >= 0) this.seek(number("e"));
    const block = this.current.run.blockOf(number("n"));
    if (block >= 0) this.current.selected = block;
    if (number("tab") >= 1) this.show(number("tab") - 1);
    this.invalidate();
  }

  _writeHash() {
    const { run, event, selected } = this.current;
    const parts = [`e=${event}`];
    if (selected >= 0) parts.push(`n=${run.id[selected]}`);
    if (this.active) parts.push(`t=${this.active}`);
    if (this.mode !== "spans") parts.push(`m=${this.mode}`);
    const hash = `#${parts.join("&")}`;
    if (hash === location.hash) return;
    // browsers refuse addresses that change at every frame
    clearTimeout(this.hashTimer);
    this.hashTimer = setTimeout(() => {
      try {
        history.replaceState(null, "", hash);
      } catch {
        /* a frame without an address */
      }
    }, 300);
  }

  // Drawing

  invalidate() {
    if (this.waiting || !this.colours) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      if (this.waiting) this.draw();
    });
  }

  draw() {
    this.waiting = false;
    for (const pane of this.panes) {
      const scene = this.scene(pane);
      pane.map.draw(scene);
      pane.strip.draw(scene);
      if (!this.playing) {
        const held = pane.run.deviceAt[pane.event];
        pane.map.canvas.setAttribute(
          "aria-label",
          `Tree of ${plural(pane.run.count, "block")} at event ${pane.event} of ${pane.run.events - 1}; the Table panel has it as text`,
        );
        pane.strip.canvas.setAttribute(
          "aria-label",
          `KV over the run: ${count(held)}${pane.run.budget ? ` of ${count(pane.run.budget)}` : ""} tokens on the device at event ${pane.event}${pane.run.shares ? `, ${count(pane.run.poolAt[pane.event])} of all problems` : ""}`,
        );
      }
    }
    const { run, event } = this.current,
      record = run.records[event];
    this.panels[this.panel].show(this.scene());
    const slider = find("slider");
    slider.value = String(run.axes[this.axis][event] / this.axisEnd);
    slider.setAttribute("aria-valuetext", `event ${event} of ${run.events - 1}, ${record.e}`);
    const opening = this.active === this.opening.place && event === this.opening.event && this.opening.says;
    find("now").replaceChildren(
      make("b", {}, count(event)),
      make("span", { class: "of" }, ` / ${count(run.events - 1)} · ${seconds(run.axes.time[event])} `),
      ...(opening
        ? [make("span", { class: "moment" }, opening)]
        : [make("b", { class: `type ${kindOf(record)}` }, record.e), ` ${sentence(record)}`]),
    );
    find("now").title = opening || sentence(record);
    find("to-end").hidden = !opening;
    find("now").setAttribute("aria-live", this.playing ? "off" : "polite");
    this._writeHash();
  }

  /** The folded state at the cursor, for tests and for the console. */
  state(place = this.active) {
    const { run, state, event } = this.panes[place];
    const blocks = [];
    for (let block = 0; block < run.count; block++) {
      if (state.state[block] === UNBORN) continue;
      blocks.push({
        id: run.id[block],
        tokens: state.tokens[block],
        device: state.device[block],
        stored: state.host[block],
        state: STATES[state.state[block]],
        value: Number.isFinite(state.value[block]) ? state.value[block] : 0,
      });
    }
    return {
      event,
      blocks,
      running: run.running(event),
      device: run.deviceAt[event],
      host: run.hostAt[event],
      compressed: run.compressedAt[event],
    };
  }
}

function fail(text) {
  find("failure").textContent = text;
  find("failure").hidden = false;
  document.documentElement.dataset.ready = "failed";
}

async function open() {
  if (typeof DecompressionStream !== "function" || !CanvasRenderingContext2D.prototype.roundRect) {
    return fail("This page needs Chrome 99, Firefox 113 or Safari 16.4, or anything later.");
  }
  const runs = [];
  for (const element of document.querySelectorAll("script.run")) runs.push(new Run(await unpack(element)));
  if (!runs.length || runs.some((run) => !run.events)) return fail("This page has no events.");
  const view = new View(runs);
  view.draw();
  window.arbor = view;
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  return view;
}

open().catch((error) => {
  fail(`This page cannot show its trace: ${error.message}`);
  throw error;
});
