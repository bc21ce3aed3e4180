// describe.js: events, blocks and numbers in words. Every value of a trace reaches the page as text, never as markup.

const count = (value) => (Number.isFinite(value) ? String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",") : "–"); // only whole numbers come here
const fixed = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;
const sum = (rows) => rows.reduce((total, row) => total + row[1], 0);

function bytes(value) {
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return `${unit === "B" || value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
}

function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 1
    ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`
    : `${value.toFixed(value < 100 ? 2 : 0)} s`;
}

/** A few of many ids: "#3 #4 #5 and 12 more". */
function some(ids, most = 4) {
  const shown = ids
    .slice(0, most)
    .map((id) => `#${id}`)
    .join(" ");
  return ids.length > most ? `${shown} and ${count(ids.length - most)} more` : shown;
}

/** Words of a trace; null means that there are none, undefined that `--trace-text none` left them out. */
/** The score of an answer; nothing where no value was read. */
const scored = (value, digits = 2) => (Number.isFinite(value) ? `, score ${value.toFixed(digits)}` : "");
const wordsOr = (value, none) => value ?? (value === null ? none : "(left out)");

const verdict = (correct) => (correct === true ? ", correct" : correct === false ? ", wrong" : "");

const ids = (rows) => rows.map((row) => row[0]);

const SENTENCES = {
  __proto__: null, // an event of a type called toString is one of an unknown type
  header: (record) => `${record.task || "run"}: ${wordsOr(record.problem, "(no text)")}`,
  node: (record) =>
    record.parent === null
      ? `#${record.node}, the prompt, ${plural(record.tokens, "token")}`
      : `#${record.node} opens below #${record.parent}`,
  boundary: (record) =>
    `#${record.node} closes (${record.stop}), ${plural(record.tokens, "token")}: ${line(record.text)}`,
  stop: (record) =>
    `below #${record.leaf} one branch is confident after ${plural(record.tokens, "token")}: ${some(list(record.stopped))} end early`,
  select: (record) =>
    `grow ${pairs(record.leaves)
      .map(([id, width]) => `#${id} ×${width}`)
      .slice(0, 6)
      .join(", ")}`,
  transition: (record) =>
    `${some(list(record.previous)) || "start"} → ${some(list(record.leaves))}, distance ${count(record.distance)}`,
  pressure: (record) =>
    `${count(record.needed)} slots needed, ${count(record.free)} of ${count(record.limit)} free`,
  evict: (record) =>
    `${plural(sum(pairs(record.nodes)), "token")} of ${some(ids(pairs(record.nodes)))} leave (${record.cause})${sum(pairs(record.stored)) ? `, ${count(sum(pairs(record.stored)))} of them to a lower tier` : ""}`,
  discard: (record) =>
    `${plural(sum(pairs(record.nodes)), "token")} of ${some(ids(pairs(record.nodes)))} given up by a lower tier${sum(pairs(record.taken)) ? `, ${count(sum(pairs(record.taken)))} of them go to ${some(ids(pairs(record.taken)))}` : ""}`,
  rehydrate: (record) =>
    `${plural(sum(pairs(record.nodes)), "token")} of ${some(ids(pairs(record.nodes)))} come back (${record.mode})${record.repeated ? `, ${count(record.repeated)} repeated` : ""}`,
  share: (record) =>
    `${plural(sum(pairs(record.nodes)), "token")} of ${some(ids(pairs(record.nodes)))} taken from ${record.source === "file" ? "a file of an earlier run" : "equal ones elsewhere"}, not computed`,
  compare: (record) =>
    record.shared
      ? `similarity ${fixed(record.similarity)}: an earlier prompt of ${plural(record.other_tokens, "token")} is read instead (lossy)`
      : `similarity ${fixed(record.similarity)} to an earlier prompt, below ${fixed(record.threshold)}`,
  audit: (record) =>
    `from its own prompt: ${wordsOr(record.answer, "no answer")}, ${record.same ? "the same" : "another answer"}`,
  merge: (record) =>
    list(record.nodes)
      .filter(Array.isArray)
      .slice(0, 4)
      .map(([id, sibling, tokens]) => `#${id} shares ${plural(tokens, "token")} with #${sibling}`)
      .join(", "),
  allocate: (record) =>
    `${record.policy} divides ${count(record.room)} slots among ${plural(record.offered, "block")} (${record.cause}): ${some(ids(pairs(record.nodes)))} lose ${plural(
      list(record.nodes).reduce((total, row) => total + (row[1] - row[2] || 0), 0),
      "token",
    )}`,
  forward: (record) =>
    `${record.kind}: ${plural(record.rows, "row")} in ${plural(record.steps, "step")}, ${seconds(record.elapsed_s)}`,
  sample: (record) => `a token for ${some(list(record.nodes))}`,
  score: (record) =>
    `${record.verifier}: ${plural(record.steps, "score")}, ${plural(record.computed, "token")} computed of ${record.path_tokens}, ${seconds(record.elapsed_s)}`,
  verify: (record) =>
    `${record.verifier}${record.skipped ? " skipped" : ""}: ${list(record.nodes)
      .slice(0, 4)
      .map((id, i) => `#${id} ${fixed(list(record.values)[i])}`)
      .join(", ")}${list(record.nodes).length > 4 ? " …" : ""}${audit(record)}`,
  prune: (record) => `${some(list(record.nodes))} pruned`,
  terminal: (record) => `#${record.node} ends its path: ${wordsOr(record.answer, "no answer")}${record.guessed ? " (guessed)" : ""}${record.cut ? " (cut at a limit)" : ""}`,
  answer: (record) =>
    `${wordsOr(record.node === null ? null : record.text, "no answer")}${record.guessed ? " (guessed)" : ""}${scored(record.score)}${verdict(record.correct)}`,
  end: (record) =>
    `${record.status}${record.limit ? ` (${record.limit})` : ""}, ${plural(record.nodes, "block")}`,
};

/** What an audited verification prefers. */
function audit(record) {
  const audited = list(record.audited);
  if (!audited.length) return "";
  const values = list(record.values);
  const agrees = audited[values.indexOf(Math.max(...values))] === Math.max(...audited);
  return agrees ? "; the audit agrees" : "; the audit prefers another";
}

/** One line of a text. */
function line(text) {
  return typeof text === "string" ? text.replace(/\s+/g, " ").trim() : "";
}

/**
 * The event that a page opens at: the largest rehydration, else the first backtrack, the largest eviction under pressure,
 * the end with its answer, or the moment with the most KV. `rank` orders them, for two runs; `says` is what one sees there.
 */
function openingMoment(run) {
  const last = run.events - 1;
  const answered = run.answer ? run.blockOf(run.answer.node) : -1,
    closed = answered < 0 ? 0 : run.closed[answered];
  /** The event with the largest measure, once the answer's path is there if that leaves any. */
  const largest = (events, measure) => {
    const late = [...events].filter((event) => event > closed);
    return (late.length ? late : [...events]).reduce(
      (most, event) => (most < 0 || measure(event) > measure(most) ? event : most),
      -1,
    );
  };
  const back = largest(run.ofType("rehydrate"), (event) => sum(pairs(run.records[event].nodes)));
  if (back >= 0) {
    const record = run.records[back],
      rows = pairs(record.nodes);
    const how = record.mode === "fetch" ? "fetched from a lower tier" : "computed again";
    return {
      rank: 3,
      event: back,
      says: `The search returns to ${plural(rows.length, "evicted block")} (orange): ${plural(sum(rows), "token")} ${how}.`,
    };
  }
  if (run.backtracks.length) {
    const leaves = list(run.records[run.backtracks[0]].leaves);
    const says = `The search leaves its path and goes on at ${some(leaves)}.`;
    return { rank: 2, event: run.backtracks[0], says };
  }
  const needed = [...run.ofType("evict")].filter((event) => run.records[event].cause === "pressure");
  const tightest = largest(needed, (event) => sum(pairs(run.records[event].nodes)));
  if (tightest >= 0) {
    const rows = pairs(run.records[tightest].nodes);
    const budget = run.budget ? ` to stay within ${plural(run.budget, "token")}` : "";
    return {
      rank: 1,
      event: tightest,
      says: `Memory runs short: ${plural(sum(rows), "token")} of ${plural(rows.length, "block")} (orange) leave it${budget}.`,
    };
  }
  if (answered >= 0) return { rank: 0, event: last, says: "" };
  let most = last;
  for (let event = last; event >= 0; event--) if (run.deviceAt[event] > run.deviceAt[most]) most = event;
  if (!run.deviceAt[most]) return { rank: 0, event: last, says: "" };
  const limit = run.budget ? ` of ${count(run.budget)}` : "";
  return {
    rank: 0,
    event: most,
    says: `The most KV at once: ${count(run.deviceAt[most])}${limit} tokens; none had to leave.`,
  };
}

/** An event in one sentence; one of an unknown type by its fields. */
function sentence(record) {
  const known = SENTENCES[record.e];
  if (known) return known(record);
  return Object.entries(record)
    .filter(([key]) => !["e", "i", "t", "kv"].includes(key))
    .map(([key, value]) => `${key}=${brief(value)}`)
    .join("  ");
}

/** A JSON value in a few characters. */
function brief(value, most = 48) {
  const text =
    typeof value === "string"
      ? value
      : typeof value === "number" && !Number.isInteger(value)
        ? String(Number(value.toPrecision(4)))
        : (JSON.stringify(value) ?? "");
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/**
 * An event's facts about one block, whatever its type: its scalars, and the block's entry of each list that is
 * parallel to its blocks.
 */
function factsAbout(record, id) {
  const facts = [];
  const order = list(record.nodes).map((item) =>
    Array.isArray(item) ? item[0] : item && item.node !== undefined ? item.node : item,
  );
  const place = order.indexOf(id);
  for (const [key, value] of Object.entries(record)) {
    if (["e", "i", "t", "kv", "node", "text"].includes(key)) continue;
    if (!Array.isArray(value)) {
      if (value !== null && typeof value === "object") {
        if (Object.hasOwn(value, id)) facts.push([key, brief(value[id])]);
        else facts.push([key, brief(value)]);
      } else {
        facts.push([key, brief(value)]);
      }
      continue;
    }
    const own = value.find((item) => Array.isArray(item) && item[0] === id && item.length > 1);
    if (own)
      facts.push([
        key,
        own
          .slice(1)
          .map((item) => brief(item))
          .join(", "),
      ]);
    else if (key !== "nodes" && place >= 0 && value.length === order.length)
      facts.push([key, brief(value[place])]);
    else if (!GENERIC.includes(key)) facts.push([key, brief(value)]);
  }
  return facts;
}

/** An element with classes, attributes and text or children; text is always text. */
function make(tag, settings = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style")
      for (const [key, setting] of Object.entries(value)) element.style.setProperty(key, setting);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const each of inside.flat()) {
    if (each === null || each === undefined) continue;
    element.append(each instanceof Node ? each : String(each));
  }
  return element;
}

const find = (id) => document.getElementById(id);

/** Blocks that match a filter: `#12`, `v>0.7`, `pruned`, `tier:host`, or words of the text. Null without a filter. */
function matches(run, state, filter) {
  const words = filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  const tests = words.map((word) => wordTest(run, state, word));
  const found = [];
  for (let block = 0; block < run.count; block++) {
    if (tests.every((test) => test(block))) found.push(block);
  }
  return found;
}

function wordTest(run, state, word) {
  const id = /^#(\d+)$/.exec(word);
  if (id) return (block) => run.id[block] === Number(id[1]);
  const compare = /^(v|value|tokens|depth)(<=|>=|<|>|=)(-?[\d.]+)$/.exec(word);
  if (compare) {
    const [, field, sign, text] = compare,
      wanted = Number(text);
    const of =
      field === "tokens"
        ? (block) => run.length[block]
        : field === "depth"
          ? (block) => run.depth[block]
          : (block) => state.value[block];
    return (block) => {
      const value = of(block);
      return sign === "<"
        ? value < wanted
        : sign === ">"
          ? value > wanted
          : sign === "<="
            ? value <= wanted
            : sign === ">="
              ? value >= wanted
              : value === wanted;
    };
  }
  const kept = (block) => state.device[block] + state.host[block];
  const tiers = {
    "tier:device": (block) => state.device[block] > 0,
    "tier:host": (block) => state.host[block] > 0,
    "tier:gone": (block) => state.tokens[block] > 0 && kept(block) === 0,
    "tier:part": (block) => kept(block) > 0 && kept(block) < state.tokens[block],
    answer: (block) => run.answerPath[block] === 1,
    running: (block) => state.active[block] === 1,
  };
  if (tiers[word]) return tiers[word];
  const wanted = STATES.indexOf(word);
  if (wanted >= 0) return (block) => state.state[block] === wanted;
  return (block) => run.text(block).toLowerCase().includes(word);
}
