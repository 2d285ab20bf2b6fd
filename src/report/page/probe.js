// A probe: what the heads of a language model do as inputs grow.

function drawProbe({ runs: [run] }) {
  const probe = run.results;
  header(`probe of ${probe.model.name}`, ...probeHeadline(probe));
  addClasses(section("Classes of heads"), probe);
  if (probe.settings) addSettings(section("Does sharpening help?"), probe.settings);
  addHeadEntropies(section("Entropy against length"), probe);
  addHeadMap(section("Every head"), probe);
  addHorizons(section("Horizons"), probe);
  addHeads(section("Head by head"), probe);
  addProbeOrigin(section("How it was made"), probe);
}

const tokens = (n) => (n < 1e7 ? count(Number(fixed(n, 0))) : short(n));
const headName = ({ layer, head }) => `layer ${layer}, head ${head}`;
const minus = (text) => text.replace("-", "−");

// The error with as many decimals as the mean, unless nothing would be left of it.
function withError(mean, error) {
  if (!isNumber(mean) || !isNumber(error)) return minus(short(mean));
  const decimals = /^-?[\d,]+(?:\.(\d*))?$/.exec(short(mean))?.[1]?.length ?? 0;
  const rounded = fixed(error, decimals);
  return `${minus(short(mean))} ±${Number(rounded) === 0 ? short(error) : rounded}`;
}
const longestOf = (probe) => probe.lengths[probe.lengths.length - 1];
const valueOf = (length, statistic, { layer, head }) => length.statistics[statistic].mean[layer][head];
const errorOf = (length, statistic, { layer, head }) => length.statistics[statistic].error[layer][head];

// ---- classes

// Colour and marker, in the order of tables.
const HEAD_CLASSES = {
  dispersing: { colour: "--c1", dash: null, symbol: d3.symbolTriangle },
  sink: { colour: "--c7", dash: null, symbol: d3.symbolSquare },
  uniform: { colour: "--c4", dash: null, symbol: d3.symbolDiamond },
  sharp: { colour: "--c0", dash: null, symbol: d3.symbolCircle },
};
const headsOf = (probe, name) => probe.heads.filter((head) => head.class === name);
const classesIn = (heads) => Object.keys(HEAD_CLASSES).filter((name) => heads.some((head) => head.class === name));

function classMeaning(name, { sink, uniform, dispersing }) {
  return {
    dispersing: `Neither sink nor uniform, and entropy grows with the length: its slope against ln n is ${short(dispersing)} or more, the interval above 0.`,
    sink: `The first key has a weight of ${short(sink)} or more.`,
    uniform: `No sink, and weights are nearly even: entropy / ln n is ${short(uniform)} or more.`,
    sharp: "The others: entropy that hardly grows.",
  }[name];
}

function probeHeadline(probe) {
  const { model, prompts, lengths } = probe;
  const dispersing = headsOf(probe, "dispersing").length;
  const reach = lengths.length === 1 ? `${tokens(lengths[0].tokens)} tokens` : `${tokens(lengths[0].tokens)} to ${tokens(longestOf(probe).tokens)} tokens`;
  const said = `${plural(dispersing, "head")} of ${count(probe.heads.length)}`;
  const origin =
    `${model.name} (${model.architecture}), ${plural(model.layers, "layer")} of ${plural(model.heads, "head")}; ` +
    `${plural(prompts.per_length, "prompt")} at each of ${plural(lengths.length, "length")}, ${reach}.`;
  if (probe.verdict) return verdictHeadline(probe.verdict, `${said} ${dispersing === 1 ? "disperses" : "disperse"} as inputs grow. ${origin}`);
  return [[element("strong", {}, said), ` ${dispersing === 1 ? "disperses" : "disperse"} as inputs grow to ${tokens(longestOf(probe).tokens)} tokens`], origin];
}

// A long verdict up to its colon, the reasons below.
function verdictHeadline(verdict, origin) {
  const colon = verdict.indexOf(": ");
  if (verdict.length < 140 || colon < 0 || colon > 100) return [[verdict], origin];
  const reasons = element("span", { class: "reasons" }, capital(verdict.slice(colon + 2)));
  return [[verdict.slice(0, colon)], element("span", {}, reasons, origin)];
}

function classKey(name) {
  const key = element("span", { class: "key" });
  key.style.setProperty("--key", `var(${HEAD_CLASSES[name].colour})`);
  return element("span", {}, key, name);
}

function addClasses(parent, probe) {
  const measured = probe.prompts.rows === "all" ? "means over all queries of a prompt" : "of the last query of a prompt, the one that answers";
  parent.append(
    element("p", { class: "note" }, `At ${tokens(longestOf(probe).tokens)} tokens; statistics are ${measured}.`),
    table(
      "Heads by class",
      [{ text: "class", class: "text narrow" }, "heads", { text: "what it means", class: "text" }],
      Object.keys(HEAD_CLASSES).map((name) => {
        const heads = headsOf(probe, name).length;
        return [
          { text: classKey(name), class: "text narrow" },
          { text: count(heads), "data-class": name },
          { text: classMeaning(name, probe.thresholds), class: "text" },
        ];
      }),
    ),
  );
}

// ---- head by head

const SHOWN_HEADS = 12;

// By class, in a class by slope, the steepest first.
function orderedHeads(probe) {
  const names = Object.keys(HEAD_CLASSES);
  return [...probe.heads].sort((a, b) => names.indexOf(a.class) - names.indexOf(b.class) || (b.slope ?? -Infinity) - (a.slope ?? -Infinity) || 0);
}

function addHeads(parent, probe) {
  const heads = orderedHeads(probe);
  const dispersing = headsOf(probe, "dispersing").length;
  const first = heads.slice(0, dispersing > 0 ? Math.min(dispersing, SHOWN_HEADS) : SHOWN_HEADS);
  const caption = dispersing === 0 ? "The first heads; none disperses" : dispersing > SHOWN_HEADS ? `The ${SHOWN_HEADS} heads that disperse fastest` : "The heads that disperse";
  parent.append(
    element(
      "p",
      { class: "note" },
      `Entropy H in nats, its slope against ln n with the 95 % interval; what follows is at ${tokens(longestOf(probe).tokens)} tokens. β is that of the rule ${probe.rule}.`,
    ),
    headTable(caption, probe, first),
  );
  if (first.length === heads.length) return;
  parent.append(
    element("details", {}, element("summary", {}, `All ${plural(heads.length, "head")}: dispersing, sink, uniform, sharp`), headTable("All heads", probe, heads)),
  );
}

function headTable(caption, probe, heads) {
  const [shortest, longest] = [probe.lengths[0], longestOf(probe)];
  return table(
    caption,
    ["layer", "head", { text: "class", class: "text narrow" }, `H at ${tokens(shortest.tokens)}`, `H at ${tokens(longest.tokens)}`, "H / ln n", "slope", "peak", "first key", "spread", "horizon", "β"],
    heads.map((head) => {
      const value = (statistic, digits, length = longest) => {
        const mean = valueOf(length, statistic, head);
        return !isNumber(mean) ? "–" : Math.abs(mean) < 1e6 ? minus(fixed(mean, digits)) : minus(short(mean));
      };
      return [
        { text: String(head.layer), "data-layer": head.layer },
        String(head.head),
        { text: classKey(head.class), class: "text narrow" },
        value("entropy", 3, shortest),
        value("entropy", 3),
        value("relative_entropy", 2),
        withInterval(head),
        value("peak", 3),
        value("first", 3),
        value("spread", 1),
        isNumber(head.horizon) ? tokens(head.horizon) : "–",
        value("beta", 2),
      ];
    }),
  );
}

// ---- provenance

function addProbeOrigin(parent, probe) {
  const group = (title, content) => element("div", {}, element("h4", {}, title), content);
  const { model, prompts, thresholds, rule, horizon_weight: weight } = probe;
  const { example, ...drawn } = prompts;
  parent.append(
    element(
      "div",
      { class: "facts" },
      group("Run", facts(probe.provenance)),
      group("Model", facts({ ...model, parameters: count(model.parameters), ...(model.context ? { context: `${count(model.context)} tokens` } : {}) })),
      group("Prompts", facts({ ...drawn, lengths: probe.lengths.map((length) => tokens(length.tokens)).join(", "), example })),
      group("Rule and thresholds", facts({ rule, "horizon weight": weight, ...Object.fromEntries(Object.entries(thresholds).map(([name, value]) => [`threshold of ${name}`, value])) })),
    ),
  );
}
