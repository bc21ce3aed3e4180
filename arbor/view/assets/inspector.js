// inspector.js: everything about one block at one event, and the small parts that all panels are made of.
// A panel is built once; `show(scene)` updates it to the scene's event and block.

const link = (id, go, label = `#${id}`) =>
  make("button", { type: "button", class: "chip", on: { click: () => go(id) } }, label);

const fact = (name, ...value) => [make("dt", {}, name), make("dd", {}, ...value)];

/** A block of a panel under a heading. */
const part = (title, ...inside) => make("section", { class: "part" }, make("h3", {}, title), ...inside);

const meter = (share, kind = "") =>
  make(
    "span",
    { class: `meter ${kind}`, "aria-hidden": "true" },
    make("i", { style: { width: `${100 * Math.max(0, Math.min(1, share || 0))}%` } }),
  );

class BlockPanel {
  constructor(view) {
    this.view = view;
    this.name = "Block";
    this.body = make("div", { class: "panel" });
  }

  show(scene) {
    const { run, state, selected } = scene;
    const scroll = this.body.scrollTop;
    this.spark = null;
    this.body.replaceChildren(
      ...(selected < 0
        ? [make("p", { class: "hint" }, "Select a block in the tree, or press a for the answer.")]
        : this._block(scene, run, state, selected)),
    );
    this.body.scrollTop = scroll;
    if (this.spark) this.spark(); // it has its size only now
  }

  _block(scene, run, state, block) {
    const id = run.id[block],
      born = state.state[block] !== UNBORN;
    const kind = run.parent[block] < 0 ? "prompt" : `thought ${run.depth[block]}`;
    const states = [STATES[state.state[block]] === "unborn" ? "not opened yet" : STATES[state.state[block]]];
    if (state.active[block]) states.push("running");
    if (run.answerPath[block]) states.push("on the answer's path");
    return [
      make(
        "h2",
        {},
        `#${id} `,
        make("small", {}, kind),
        ...states.map((each) => make("span", { class: `state ${each}` }, each)),
      ),
      this._text(run, block),
      born ? this._kept(run, state, block) : null,
      this._scores(run, state, block),
      this._verified(scene, run, block),
      this._policy(scene, run, block),
      this._family(run, state, block),
      this._history(scene, run, block),
    ].filter(Boolean);
  }

  _text(run, block) {
    const text = run.text(block);
    const answer = run.answers.get(block);
    return make(
      "div",
      {},
      make(
        "pre",
        { class: "text", tabindex: 0, "aria-label": "Text of the block" },
        text || (run.closing(block) || run.parent[block] < 0 ? NO_TEXT : "(never closed)"),
      ),
      answer ? make("p", { class: "answers" }, "answers ", make("b", {}, answer)) : null,
    );
  }

  _kept(run, state, block) {
    const tokens = state.tokens[block],
      device = state.device[block],
      host = state.host[block];
    const gone = Math.max(0, tokens - device - host);
    const row = (name, value, kind) =>
      make(
        "div",
        { class: "kept" },
        make("span", {}, name),
        meter(tokens ? value / tokens : 0, kind),
        make("span", { class: "number" }, `${count(value)}/${count(tokens)}`),
      );
    return part(
      "KV",
      state.state[block] === OPEN
        ? make("p", { class: "hint" }, "decoding: tokens are counted when the block closes")
        : null,
      row("device", device, state.active[block] ? "active" : "idle"),
      host || this.view.hosted ? row("host", host, "host") : null,
      row("gone", gone, "gone"),
      this._spark(run, block),
    );
  }

  /** Tokens on the device over the run, small. */
  _spark(run, block) {
    const steps = run.residency(block);
    if (steps.length < 2) return null;
    const canvas = make("canvas", {
      class: "spark",
      role: "img",
      "aria-label": `Tokens on the device over the run: ${steps
        .slice(-12)
        .map(([event, tokens]) => `${tokens} at event ${event}`)
        .join(", ")}`,
    });
    this.spark = () => {
      const { pen, width, height } = sharp(canvas),
        { colours } = this.view;
      const most = Math.max(1, run.length[block]),
        axis = run.axes[this.view.axis],
        end = axis[run.events - 1] || 1;
      pen.fillStyle = colours.idle;
      steps.forEach(([event, tokens], i) => {
        const from = (axis[event] / end) * width,
          to = i + 1 < steps.length ? (axis[steps[i + 1][0]] / end) * width : width;
        const tall = (height - 1) * (tokens / most);
        pen.fillRect(from, height - 1 - tall, Math.max(1, to - from), tall);
      });
      pen.fillStyle = colours.ink;
      pen.fillRect(0, height - 1, width, 1);
      pen.fillRect((axis[this.view.current.event] / end) * width, 0, 1, height);
    };
    return make("div", {}, canvas, make("p", { class: "hint small" }, "on the device, over the run"));
  }

  _scores(run, state, block) {
    const closing = run.closing(block);
    if (!closing && run.parent[block] < 0) return null;
    const record = closing || {},
      tokens = run.length[block];
    const shared = (name, value, title) =>
      Number.isFinite(value)
        ? make(
            "div",
            { class: "kept", title },
            make("span", {}, name),
            meter(value),
            make("span", { class: "number" }, fixed(value, 3)),
          )
        : null;
    const logprob = number(record.logprob);
    return part(
      "Scores",
      shared("value", state.value[block], "the verifier's value, 0 to 1"),
      shared("confidence", number(record.confidence), "1 - entropy / ln vocabulary, mean"),
      shared("top-1", number(record.top1), "mean probability of the likeliest token"),
      make(
        "dl",
        {},
        ...(Number.isFinite(logprob)
          ? fact(
              "log prob.",
              `${fixed(logprob, 3)}${tokens ? ` (${fixed(logprob / tokens, 3)} per token)` : ""}`,
            )
          : []),
        ...(record.stop ? fact("stopped by", String(record.stop)) : []),
        ...fact(
          "tokens",
          `${count(tokens)}, from ${count(run.start[block])} to ${count(run.start[block] + tokens)}`,
        ),
      ),
    );
  }

  _verified(scene, run, block) {
    const event = last(run.mentionsOf(block), (at) => run.records[at].e === "verify" && at <= scene.event);
    if (event < 0) return null;
    const record = run.records[event],
      id = run.id[block];
    const asked = isCount(record.asked) ? `model judged ${record.asked} of ${list(record.nodes).length}` : "";
    const rest = factsAbout(record, id).filter(
      ([key]) =>
        !["verifier", "values", "asked", "elapsed_s", "entropy", "layers", "exit_layer"].includes(key),
    );
    return part(
      "Verification",
      make(
        "dl",
        {},
        ...fact("by", `${record.verifier ?? "?"}${asked ? `, ${asked}` : ""}`),
        ...rest.flatMap(([key, value]) => fact(key.replaceAll("_", " "), value)),
      ),
      this._exits(record, id),
    );
  }

  /** One cell per layer: the entropy there, and the exit layer. */
  _exits(record, id) {
    const place = list(record.nodes).indexOf(id);
    const own = (value) => (Array.isArray(value) && Array.isArray(value[place]) ? value[place] : value);
    let exit = Array.isArray(record.exit_layer) ? record.exit_layer[place] : record.exit_layer;
    const entropy = list(own(record.entropy)).map(number);
    const layers = isCount(record.layers)
      ? record.layers
      : Math.max(entropy.length, isCount(exit) ? exit + 1 : 0);
    if (!layers || layers > 512 || (!entropy.length && !isCount(exit))) return null;
    if (!isCount(exit)) exit = layers;
    const most = Math.max(1e-9, ...entropy.filter(Number.isFinite));
    return make(
      "div",
      { class: "exits", role: "img", "aria-label": `left at layer ${exit} of ${layers}` },
      ...Array.from({ length: layers }, (_, layer) =>
        make("i", {
          class: layer === exit ? "exit" : layer > exit ? "skipped" : "",
          title: `layer ${layer}${Number.isFinite(entropy[layer]) ? `, entropy ${fixed(entropy[layer])}` : ""}`,
          style: {
            "--tall": Number.isFinite(entropy[layer]) ? entropy[layer] / most : layer > exit ? 0.12 : 1,
          },
        }),
      ),
      make("span", {}, `layer ${exit} of ${layers}`),
    );
  }

  /** The last decision of a retention policy about the block, or facts from an event of an unknown type. */
  _policy(scene, run, block) {
    const event = last(
      run.mentionsOf(block),
      (at) => (run.records[at].e === "allocate" || !(run.records[at].e in SENTENCES)) && at <= scene.event,
    );
    if (event < 0) return null;
    const record = run.records[event],
      place = list(record.nodes).findIndex((row) => Array.isArray(row) && row[0] === run.id[block]),
      own = list(record.nodes)[place];
    if (record.e === "allocate" && own) {
      return part(
        "Retention",
        make(
          "p",
          { class: "hint" },
          `${record.policy}, `,
          link(event, () => this.view.seek(event), `event ${event}`),
        ),
        make(
          "dl",
          {},
          ...fact("kept", `${count(own[2])} of ${count(own[1])} tokens`),
          ...Object.entries(record.signals ?? {}).flatMap(([name, column]) =>
            fact(SIGNALS[name] ?? name.replaceAll("_", " "), signal(list(column)[place])),
          ),
          ...fact("space left", `${count(record.room)} for ${plural(record.offered, "block")}`),
        ),
      );
    }
    return part(
      record.e,
      make(
        "p",
        { class: "hint" },
        "at ",
        link(event, () => this.view.seek(event), `event ${event}`),
      ),
      make(
        "dl",
        {},
        ...factsAbout(record, run.id[block]).flatMap(([key, value]) => fact(key.replaceAll("_", " "), value)),
      ),
    );
  }

  _family(run, state, block) {
    const go = (each) => () => this.view.select(each);
    const path = run.path(block).slice(0, -1),
      below = run.children[block];
    return part(
      "Family",
      make(
        "dl",
        {},
        ...(path.length ? fact("above", ...path.map((each) => link(run.id[each], go(each)))) : []),
        ...fact(
          "below",
          ...(below.length
            ? below.slice(0, 24).map((each) =>
                make(
                  "button",
                  {
                    type: "button",
                    class: `chip ${STATES[state.state[each]]}`,
                    title: line(run.text(each)),
                    on: { click: go(each) },
                  },
                  `#${run.id[each]}${Number.isFinite(state.value[each]) ? ` ${fixed(state.value[each])}` : ""}`,
                ),
              )
            : ["nothing"]),
          below.length > 24 ? ` and ${count(below.length - 24)} more` : "",
        ),
      ),
    );
  }

  _history(scene, run, block) {
    const all = run.mentionsOf(block);
    const from = Math.max(0, Math.min(all.length - 14, before(all, scene.event + 1) - 8));
    return part(
      `History, ${plural(all.length, "event")}`,
      make(
        "ol",
        { class: "history" },
        ...[...all.subarray(from, from + 14)].map((event) =>
          make(
            "li",
            {},
            make(
              "button",
              {
                type: "button",
                class: event === scene.event ? "row now" : event > scene.event ? "row later" : "row",
                on: { click: () => this.view.seek(event) },
              },
              make("span", { class: "number" }, count(event)),
              make("b", { class: `type ${kindOf(run.records[event])}` }, run.records[event].e),
              make("span", { class: "says" }, this._own(run.records[event], run.id[block])),
            ),
          ),
        ),
      ),
    );
  }

  /** An event from the side of one block. */
  _own(record, id) {
    const row = pairs(record.nodes).find((each) => each[0] === id);
    if (record.e === "evict" && row) return `loses ${plural(row[1], "token")} (${record.cause})`;
    if (record.e === "discard" && row) return `loses ${plural(row[1], "token")} of a lower tier`;
    const heir = pairs(record.taken).find((each) => each[0] === id);
    if (record.e === "discard" && heir) return `takes over ${plural(heir[1], "token")} of a lower tier`;
    if (record.e === "rehydrate" && row) return `regains ${plural(row[1], "token")} (${record.mode})`;
    if (record.e === "verify")
      return `value ${fixed(list(record.values)[list(record.nodes).indexOf(id)], 3)}`;
    if (record.e === "boundary") return `closes, ${plural(record.tokens, "token")}`;
    if (record.e === "allocate") {
      const own = list(record.nodes).find((each) => Array.isArray(each) && each[0] === id);
      if (own) return `keeps ${count(own[2])} of ${count(own[1])}`;
    }
    return record.e in SENTENCES
      ? sentence(record)
      : factsAbout(record, id)
          .map(([key, value]) => `${key}=${value}`)
          .join("  ");
  }
}

/** Labels of the columns that a retention policy read. */
const SIGNALS = {
  __proto__: null,
  scheduled: "planned read",
  next_use: "next recorded read",
  last_used: "last read",
  reentry: "revisit probability",
};

/** A value that a retention policy read; null is never. */
function signal(value) {
  return value === null ? "none" : Number.isInteger(value) ? count(value) : fixed(value, 3);
}

/** The last entry of a sorted list of events that passes a test, or -1. */
function last(events, test) {
  for (let i = events.length - 1; i >= 0; i--) if (test(events[i])) return events[i];
  return -1;
}

const kindOf = (record) => (record.e in SENTENCES ? record.e : "other");
