// panels.js: the panels next to the tree: events, regret, answers, the tree as a table, the run, two runs.

const EVENT_TALL = 25; // CSS pixels of one row of the event list
const PAGE = 200; // rows of the table on one page

// A path as one text

class PathPanel {
  constructor(view) {
    this.view = view;
    this.name = "Path";
    this.lists = true; // other blocks are selected in it
    this.body = make("div", { class: "panel path" });
  }

  show({ run, state, selected, event }) {
    const shown = `${run.name} ${selected} ${event}`;
    if (this.shown === shown) return;
    const end = this._end(run, selected),
      [prompt, ...thoughts] = run.path(end);
    const other = this.run !== run || this.end !== end,
      moved = selected !== end && (other || this.selected !== selected);
    const scroll = other ? 0 : this.body.scrollTop;
    Object.assign(this, { shown, run, end, selected });
    this.body.replaceChildren(
      ...(end < 0
        ? [make("p", { class: "hint" }, "Select a block in the tree, or press a for the answer.")]
        : [
            make(
              "h2",
              {},
              run.answerPath[end] ? "The answer's path" : `The path to #${run.id[end]}`,
              make("small", {}, this._length(run, thoughts)),
            ),
            make(
              "details",
              { open: thoughts.length === 0 },
              make("summary", {}, `the prompt, ${plural(run.length[prompt], "token")}`),
              make("p", { class: "prose" }, run.text(prompt) || line(run.header.problem) || NO_TEXT),
            ),
            ...thoughts.map((block) => this._thought(run, state, block, selected)),
            this._answer(run, end),
          ]),
    );
    const at = moved && this.body.querySelector(".step.now");
    this.body.scrollTop = at ? Math.max(0, at.offsetTop - this.body.clientHeight / 3) : scroll;
  }

  /** The last block of the path that is shown: a block of the answer's path shows all of that path. */
  _end(run, selected) {
    const answered = run.answer ? run.blockOf(run.answer.node) : -1;
    return selected >= 0 && answered >= 0 && run.path(answered).includes(selected) ? answered : selected;
  }

  _length(run, thoughts) {
    const tokens = thoughts.reduce((total, block) => total + run.length[block], 0);
    return `${plural(thoughts.length, "thought")}, ${plural(tokens, "token")}`;
  }

  _thought(run, state, block, selected) {
    const born = state.state[block] !== UNBORN;
    const value = state.value[block];
    const marks = [
      plural(run.length[block], "token"),
      ...(born && state.state[block] === PRUNED ? ["pruned"] : []),
      ...(born ? [] : ["not opened yet"]),
    ];
    const cut = CUTS[(run.closing(block) || {}).stop];
    return make(
      "section",
      { class: `step ${block === selected ? "now" : ""} ${born ? "" : "later"}` },
      make(
        "p",
        { class: "step-head" },
        link(run.id[block], () => this.view.select(block)),
        Number.isFinite(value) ? make("b", { class: "number" }, `value ${fixed(value)}`) : null,
        make("span", { class: "hint" }, marks.join(", ")),
      ),
      make("p", { class: "prose" }, run.text(block).trim() || (run.closing(block) ? NO_TEXT : "(never closed)")),
      cut ? make("p", { class: "cut" }, `✂ ${cut}`) : null,
    );
  }

  /** How the path ends: its answer, and a limit that cut it. */
  _answer(run, end) {
    const ended = last(run.mentionsOf(end), (event) => run.records[event].e === "terminal");
    if (ended < 0) return null;
    const { answer, cut, guessed } = run.records[ended];
    return make(
      "div",
      {},
      cut ? make("p", { class: "cut" }, "✂ a limit of paths cut the text here") : null,
      make(
        "p",
        { class: "answers" },
        `${guessed ? "guessed" : "answers"} `,
        make("b", {}, wordsOr(answer, "nothing")),
      ),
    );
  }
}

const NO_TEXT = "(no text in this trace)";

/** Where a block's text ends although its thought does not. */
const CUTS = {
  __proto__: null,
  length: "cut at the longest thought",
  limit: "cut at a limit of the run",
  gate: "ended early by a more confident branch",
};

// The event list

class EventPanel {
  constructor(view) {
    this.view = view;
    this.name = "Events";
    this.hidden = new Set();
    this.chips = make("div", { class: "chips", role: "group", "aria-label": "Types of events" });
    this.words = make("input", {
      type: "search",
      placeholder: "words in events",
      "aria-label": "Words in events",
      autocomplete: "off",
      spellcheck: "false",
      on: { input: () => this._refresh() },
    });
    this.space = make("div", { class: "space" });
    this.scroller = make(
      "div",
      {
        class: "scroller",
        tabindex: 0,
        role: "group",
        "aria-label": "Events",
        on: { scroll: () => this._rows() },
      },
      this.space,
    );
    this.none = make("p", { class: "hint" });
    this.whole = make("p", { class: "text whole", tabindex: 0, "aria-label": "The current event in full" });
    this.body = make("div", { class: "panel events" }, this.chips, this.words, this.none, this.whole, this.scroller);
  }

  show(scene) {
    if (this.run !== scene.run) {
      this.run = scene.run;
      this._chips();
      this._filter();
    }
    if (this.event !== scene.event || !this.shown) {
      this.event = scene.event;
      const record = this.run.records[this.event];
      this.whole.replaceChildren(make("b", {}, `${count(this.event)} ${record.e} `), sentence(record));
      this._follow();
    }
    this._rows();
  }

  _chips() {
    const counts = new Map();
    for (const record of this.run.records) counts.set(record.e, (counts.get(record.e) || 0) + 1);
    this.chips.replaceChildren(
      ...[...counts].map(([type, many]) =>
        make(
          "button",
          {
            type: "button",
            class: `filter ${type in SENTENCES ? type : "other"}`,
            "aria-pressed": String(!this.hidden.has(type)),
            title: "Click to hide or show; double-click for only this type",
            on: {
              click: (event) => {
                this._toggle(type);
                event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(type)));
              },
              dblclick: () => this._only(type, [...counts.keys()]),
            },
          },
          type,
          make("small", {}, count(many)),
        ),
      ),
    );
  }

  _toggle(type) {
    if (!this.hidden.delete(type)) this.hidden.add(type);
    this._refresh();
  }

  _only(type, types) {
    const alone = this.hidden.size === types.length - 1 && !this.hidden.has(type);
    this.hidden = new Set(alone ? [] : types.filter((each) => each !== type));
    this._chips();
    this._refresh();
  }

  _refresh() {
    this._filter();
    this._follow();
    this._rows();
  }

  _filter() {
    const words = this.words.value.trim().toLowerCase();
    const shown = [];
    this.run.records.forEach((record, event) => {
      if (this.hidden.has(record.e)) return;
      if (words && !`${record.e} ${sentence(record)}`.toLowerCase().includes(words)) return;
      shown.push(event);
    });
    this.shown = Int32Array.from(shown);
    this.space.style.height = `${this.shown.length * EVENT_TALL}px`;
    this.none.textContent =
      this.shown.length === this.run.events
        ? ""
        : `${count(this.shown.length)} of ${plural(this.run.events, "event")}`;
  }

  /** Keeps the current event in the frame. */
  _follow() {
    const at = Math.max(0, before(this.shown, this.event + 1) - 1) * EVENT_TALL,
      { scroller } = this;
    if (
      at < scroller.scrollTop + EVENT_TALL ||
      at > scroller.scrollTop + scroller.clientHeight - 2 * EVENT_TALL
    ) {
      scroller.scrollTop = Math.max(0, at - scroller.clientHeight / 2);
    }
  }

  _rows() {
    if (!this.run) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / EVENT_TALL) - 4);
    const end = Math.min(
      this.shown.length,
      first + Math.ceil((this.scroller.clientHeight || 400) / EVENT_TALL) + 8,
    );
    const rows = [];
    for (let i = first; i < end; i++) {
      const event = this.shown[i],
        record = this.run.records[event];
      rows.push(
        make(
          "button",
          {
            type: "button",
            class: event === this.event ? "row now" : event > this.event ? "row later" : "row",
            "aria-current": event === this.event ? "true" : undefined,
            style: { top: `${i * EVENT_TALL}px` },
            title: sentence(record),
            on: { click: () => this.view.seek(event) },
          },
          make("span", { class: "number" }, count(event)),
          make("b", { class: `type ${kindOf(record)}` }, record.e),
          make("span", { class: "says" }, sentence(record)),
        ),
      );
    }
    this.space.replaceChildren(...rows);
  }
}

// Rehydration regret

class RegretPanel {
  constructor(view) {
    this.view = view;
    this.name = "Regret";
    this.within = make("input", {
      type: "number",
      min: 1,
      value: 100,
      "aria-label": "Events between eviction and need",
      on: { input: () => this._fill() },
    });
    this.summary = make("p", { class: "regret-sum" });
    this.rows = make("tbody");
    this.body = make(
      "div",
      { class: "panel" },
      make(
        "p",
        { class: "hint" },
        "KV that was evicted and computed again: a better policy would have kept it.",
      ),
      make("label", { class: "within" }, "needed again within ", this.within, " events"),
      this.summary,
      make(
        "table",
        {},
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...["block", "tokens", "lost", "needed", "gap", "cause"].map((name) =>
              make("th", { scope: "col" }, name),
            ),
          ),
        ),
        this.rows,
      ),
    );
  }

  show(scene) {
    if (this.run === scene.run) return;
    this.run = scene.run;
    this._fill();
  }

  _fill() {
    const within = Number(this.within.value) || Infinity,
      { run } = this;
    const rows = run.regrets
      .filter((regret) => regret.gap <= within)
      .sort((a, b) => a.gap - b.gap || b.tokens - a.tokens);
    const tokens = rows.reduce((total, regret) => total + regret.tokens, 0);
    const share = run.evictedTokens ? (100 * tokens) / run.evictedTokens : 0;
    this.summary.textContent = run.evictedTokens
      ? `${plural(tokens, "token")} returned within ${Number.isFinite(within) ? plural(within, "event") : "any time"}: ${share.toFixed(share > 0 && share < 10 ? 1 : 0)} % of ${count(run.evictedTokens)} evicted.`
      : "Nothing was evicted in this run.";
    const seek = (event) => link(event, () => this.view.seek(event), count(event));
    this.rows.replaceChildren(
      ...rows.slice(0, PAGE).map((regret) =>
        make(
          "tr",
          {},
          make(
            "td",
            {},
            link(regret.id, () => this.view.select(run.blockOf(regret.id))),
          ),
          make("td", { class: "number" }, count(regret.tokens)),
          make("td", {}, seek(regret.lost)),
          make("td", {}, seek(regret.needed)),
          make("td", { class: "number" }, count(regret.gap)),
          make("td", {}, regret.cause),
        ),
      ),
    );
  }
}

// Candidates

class AnswerPanel {
  constructor(view) {
    this.view = view;
    this.name = "Answers";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run, state } = scene;
    if (this.run === run && this.event === scene.event) return;
    this.run = run;
    this.event = scene.event;
    const ended = [...run.ofType("terminal")]
      .filter((event) => event <= scene.event)
      .map((event) => ({
        event,
        block: run.blockOf(run.records[event].node),
        answer: run.records[event].answer,
      }))
      .filter(({ block }) => block >= 0)
      .sort((a, b) => (state.value[b.block] || 0) - (state.value[a.block] || 0) || a.event - b.event);
    const { layout } = this.view.current.map;
    const chosen = run.answer ? run.blockOf(run.answer.node) : -1;
    const merged = new Map(); // paths that end in equal siblings: the best of them, and how many there are
    for (const each of ended) {
      const first = layout.first[each.block];
      if (merged.has(first)) merged.get(first).copies++;
      else merged.set(first, { ...each, copies: 1 });
    }
    const logprob = (block) =>
      run.path(block).reduce((total, each) => total + (number((run.closing(each) || {}).logprob) || 0), 0);
    this.body.replaceChildren(
      run.answer && scene.event >= run.answeredAt
        ? make(
            "p",
            { class: "big" },
            wordsOr(run.answer.text, "no answer"),
            make("small", {}, `${scored(run.answer.score, 3)}${verdict(run.answer.correct)}`),
          )
        : make("p", { class: "hint" }, "No answer chosen yet at this event."),
      make("p", { class: "hint" }, `${plural(ended.length, "path")} ended so far.`),
      make(
        "table",
        {},
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...["block", "value", "log prob.", "answer"].map((name) => make("th", { scope: "col" }, name)),
          ),
        ),
        make(
          "tbody",
          {},
          ...[...merged.values()].slice(0, PAGE).map(({ block, answer, copies }) =>
            make(
              "tr",
              {
                class:
                  scene.event >= run.answeredAt && layout.first[block] === layout.first[chosen] ? "chosen" : "",
              },
              make(
                "td",
                {},
                link(run.id[block], () => this.view.select(block)),
              ),
              make("td", { class: "number" }, fixed(state.value[block], 3)),
              make("td", { class: "number" }, fixed(logprob(block))),
              make("td", { class: "wraps" }, `${wordsOr(answer, "–")}${copies > 1 ? ` ×${copies}` : ""}`),
            ),
          ),
        ),
      ),
    );
  }
}

// The tree as a table, for screen readers

class TablePanel {
  constructor(view) {
    this.view = view;
    this.name = "Table";
    this.lists = true; // other blocks are selected in it
    this.page = 0;
    this.caption = make("caption");
    this.rows = make("tbody");
    this.turn = make("p", { class: "turn" });
    this.body = make(
      "div",
      { class: "panel" },
      make(
        "table",
        { class: "tree" },
        this.caption,
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...["block", "state", "kept", "value"].map((name) => make("th", { scope: "col" }, name)),
          ),
        ),
        this.rows,
      ),
      this.turn,
    );
  }

  show(scene) {
    const { run, state } = scene;
    if (this.run !== run) this.page = 0;
    this.run = run;
    const moved = scene.selected !== this.selected;
    if (moved) {
      this.selected = scene.selected;
      if (scene.selected >= 0) this.page = Math.floor(run.order.indexOf(scene.selected) / PAGE);
    }
    const pages = Math.max(1, Math.ceil(run.count / PAGE));
    this.caption.textContent = `${plural(run.count, "block")} at event ${count(scene.event)}, depth first`;
    this.rows.replaceChildren(
      ...run.order.slice(this.page * PAGE, (this.page + 1) * PAGE).flatMap((block) => {
        const born = state.state[block] !== UNBORN;
        const kind = `${block === scene.selected ? "now" : ""} ${born ? "" : "later"}`;
        const row = make(
          "tr",
          { class: kind },
          make(
            "th",
            { scope: "row", style: { "--depth": Math.min(12, run.depth[block]) } },
            link(run.id[block], () => this.view.select(block)),
          ),
          make("td", {}, born ? STATES[state.state[block]] : "–"),
          make(
            "td",
            { class: "number" },
            `${count(state.device[block] + state.host[block])}/${count(state.tokens[block])}`,
          ),
          make("td", { class: "number" }, fixed(state.value[block])),
        );
        const text = run.text(block).trim();
        return text ? [row, make("tr", { class: `says ${kind}` }, make("td", { colspan: 4 }, text))] : [row];
      }),
    );
    const row = moved && this.rows.querySelector(".now");
    if (row) this.body.scrollTop = row.offsetTop - this.body.clientHeight / 2;
    const turn = (to, label) =>
      make(
        "button",
        {
          type: "button",
          disabled: to < 0 || to >= pages,
          on: {
            click: () => {
              this.page = to;
              this.show(this.view.scene());
            },
          },
        },
        label,
      );
    this.turn.replaceChildren(
      ...(pages > 1
        ? [
            turn(this.page - 1, "‹ before"),
            ` page ${this.page + 1} of ${pages} `,
            turn(this.page + 1, "after ›"),
          ]
        : []),
    );
  }
}

// The run: metrics and configuration

const METRICS = [
  ["wall_s", "time", seconds],
  ["decode_s", "decoding", seconds],
  ["verify_s", "verifying", seconds],
  ["reward_s", "reward model", seconds],
  ["rehydrate_s", "rehydrating", seconds],
  ["policy_s", "retention policy", seconds],
  ["blocks", "blocks", count],
  ["tokens_generated", "tokens generated", count],
  ["tok_per_s", "tokens per second", (value) => fixed(value, 0)],
  ["budget_tokens", "budget, tokens", count],
  ["peak_tokens", "peak on the device", count],
  ["peak_unshared_tokens", "peak without prefix sharing", count],
  ["tree_tokens", "tokens of the tree", count],
  ["tokens_loaded", "prompt tokens loaded", count],
  ["evicted_tokens", "tokens evicted", count],
  ["rehydrations", "rehydrations", count],
  ["tokens_recomputed", "tokens recomputed", count],
  ["tokens_stored", "tokens to lower tiers", count],
  ["tokens_fetched", "tokens fetched", count],
  ["pressure_events", "pressure", count],
  ["transitions", "transitions", count],
  ["branches_stopped", "branches stopped early", count],
  ["asked", "thoughts judged by the model", count],
  ["skipped_verifications", "verifications skipped", count],
  ["left_early", "thoughts judged before the last layer", count],
  ["disagreements", "audits that prefer another thought", count],
  ["reads_saved", "reads saved by sharing", (value) => `${fixed(100 * value, 0)} %`],
];

class RunPanel {
  constructor(view) {
    this.view = view;
    this.name = "Run";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run } = scene;
    if (this.run === run) return;
    this.run = run;
    const { header } = run,
      metrics = (run.end && run.end.metrics) || {};
    const config = JSON.stringify(header.config || {}, null, 2);
    const about = [
      ["trace", run.name],
      ["run", header.run],
      ["created", header.created],
      ["arbor", header.arbor],
      ["task", header.task],
      ["seed", header.seed],
      ["expected", header.expected],
      ["model", (header.model || {}).id],
      ["device", (header.device || {}).name],
      ["KV per token", isCount(run.plan.bytes_per_token) ? bytes(run.plan.bytes_per_token) : null],
      ["part kept", run.plan.part],
      ["full retention, at most", tokensOf(run.plan.full_tokens)],
    ];
    this.body.replaceChildren(
      part(
        "Metrics",
        Object.keys(metrics).length
          ? make(
              "dl",
              { class: "wide" },
              ...METRICS.filter(([key]) => key in metrics).flatMap(([key, label, form]) =>
                fact(label, form(metrics[key])),
              ),
            )
          : make("p", { class: "hint" }, "The run did not finish."),
      ),
      part(
        "About",
        make(
          "dl",
          { class: "wide" },
          ...about
            .filter(([, value]) => value !== undefined && value !== null)
            .flatMap(([name, value]) => fact(name, String(value))),
        ),
      ),
      part(
        "Configuration",
        copyButton(config),
        make("pre", { class: "text config", tabindex: 0, "aria-label": "Configuration" }, config),
      ),
    );
  }
}

/** A number of tokens in words; null where there is none. */
function tokensOf(value) {
  return isCount(value) ? plural(value, "token") : null;
}

function copyButton(text) {
  const button = make("button", { type: "button", class: "copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.nextElementSibling); // a file or a frame may not write: select instead
      button.textContent = "selected";
    }
    setTimeout(() => {
      button.textContent = "copy";
    }, 1500);
  });
  return button;
}

// Two runs

class ComparePanel {
  constructor(view) {
    this.view = view;
    this.name = "A / B";
    this.body = make("div", { class: "panel" });
  }

  show() {
    if (this.done) return;
    this.done = true;
    const [a, b] = this.view.panes.map((pane) => pane.run);
    const metrics = [a, b].map((run) => (run.end && run.end.metrics) || {});
    const apart = parting(a, b);
    this.body.replaceChildren(
      part(
        "Where they part",
        make(
          "p",
          {},
          apart.text,
          ...apart.seek
            .map((event, i) =>
              event < 0
                ? null
                : [" ", link(event, () => this.view.seek(event, i), `${"AB"[i]} event ${count(event)}`)],
            )
            .flat(),
        ),
      ),
      part(
        "Metrics",
        make(
          "table",
          {},
          make(
            "thead",
            {},
            make("tr", {}, ...["", "A", "B", "B / A"].map((name) => make("th", { scope: "col" }, name))),
          ),
          make(
            "tbody",
            {},
            ...METRICS.filter(([key]) => key in metrics[0] && key in metrics[1]).map(([key, label, form]) =>
              make(
                "tr",
                {},
                make("th", { scope: "row" }, label),
                ...metrics.map((of) => make("td", { class: "number" }, form(of[key]))),
                make(
                  "td",
                  { class: "number" },
                  metrics[0][key] ? `${fixed(metrics[1][key] / metrics[0][key])}×` : "–",
                ),
              ),
            ),
          ),
        ),
      ),
      part(
        "Settings that differ",
        make(
          "table",
          {},
          make(
            "tbody",
            {},
            ...differences(a.header.config || {}, b.header.config || {}).map(([key, left, right]) =>
              make(
                "tr",
                {},
                make("th", { scope: "row" }, key),
                make("td", { class: "wraps" }, brief(left)),
                make("td", { class: "wraps" }, brief(right)),
              ),
            ),
          ),
        ),
      ),
    );
  }
}

/** The first block that differs, in the order blocks were opened. */
function parting(a, b) {
  const both = Math.min(a.count, b.count);
  const words = ![a, b].some(({ header }) => header.schema && header.problem === undefined);
  const texts = words ? "the same texts" : "the same lengths (texts are left out)";
  for (let block = 0; block < both; block++) {
    if (
      (words && a.text(block) !== b.text(block)) ||
      a.parent[block] !== b.parent[block] ||
      a.length[block] !== b.length[block]
    ) {
      return {
        text: `The trees differ from block #${a.id[block]} on.`,
        seek: [a.closed[block], b.closed[block]],
      };
    }
  }
  if (a.count !== b.count)
    return { text: `The first ${plural(both, "block")} are equal; then one tree goes on.`, seek: [] };
  const trees = `The trees are equal: ${plural(both, "block")}, ${texts}`;
  const event = firstDifference(a, b, words);
  if (event < 0) return { text: `${trees}. So are all events, times aside.`, seek: [] };
  return {
    text: `${trees}. Their events differ, as where KV was.`,
    seek: [a, b].map((run) => (event < run.events ? event : -1)),
  };
}

// what a trace without words leaves out
const WORDS = new Set(["problem", "expected", "text", "alternatives", "answer"]);

/** The first event that differs, headers and times aside; -1 where none does. */
function firstDifference(a, b, words) {
  const steady = (record) =>
    record &&
    record.e !== "header" &&
    JSON.stringify({ ...record, i: undefined, t: undefined }, (key, value) => {
      if (key.endsWith("_s") || (!words && WORDS.has(key))) return undefined;
      return typeof value === "number" ? Number(value.toPrecision(5)) : value;
    });
  for (let event = 0; event < Math.max(a.events, b.events); event++)
    if (steady(a.records[event]) !== steady(b.records[event])) return event;
  return -1;
}

/** Settings that differ, as [dotted key, of A, of B]. */
function differences(a, b, prefix = "") {
  const found = [];
  for (const key of new Set([...Object.keys(a), ...Object.keys(b)])) {
    const [left, right] = [a[key], b[key]];
    const inside = [left, right].every(
      (value) => value && typeof value === "object" && !Array.isArray(value),
    );
    if (inside) found.push(...differences(left, right, `${prefix}${key}.`));
    else if (JSON.stringify(left) !== JSON.stringify(right)) found.push([prefix + key, left, right]);
  }
  return found;
}
