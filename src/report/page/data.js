// What results hold (src/results/results.h), in the shapes that figures need. Any number may be null, and any rule
// may be missing.

// Object.hasOwn, not `in`: a rule may be called "constructor".
const own = (object, key) => (object && Object.hasOwn(object, key) ? object[key] : undefined);

const RULE_NAMES = {
  softmax: "softmax",
  trained: "as trained",
  paper: "paper’s rule",
  fixed: "fixed β = 2",
  log_length: "log length",
  target_entropy: "target entropy",
  target_peak: "target peak",
  refit: "refitted polynomial",
  hard: "ceiling",
};
const ruleName = (rule) => own(RULE_NAMES, rule) ?? rule;

const RULES_IN_SENTENCES = { paper: "the paper’s rule", trained: "the weighting of training", refit: "the refitted polynomial", hard: "the ceiling" };
const ruleInSentence = (rule) => own(RULES_IN_SENTENCES, rule) ?? ruleName(rule);

// Colour, dash and marker: any one of them tells curves apart.
const LOOKS = [
  { colour: "--c0", dash: null, symbol: d3.symbolCircle },
  { colour: "--c1", dash: "7 3", symbol: d3.symbolSquare },
  { colour: "--c2", dash: "2 2", symbol: d3.symbolTriangle },
  { colour: "--c3", dash: "8 3 2 3", symbol: d3.symbolDiamond },
  { colour: "--c4", dash: "12 3", symbol: d3.symbolCross },
  { colour: "--c5", dash: "4 2", symbol: d3.symbolStar },
  { colour: "--c6", dash: "1 3", symbol: d3.symbolWye },
  { colour: "--c7", dash: "9 2 2 2 2 2", symbol: d3.symbolCircle },
];
const RULE_LOOKS = ["softmax", "paper", "target_entropy", "target_peak", "refit", "log_length", "fixed", "trained"];
// Wide and pale, below the curves that reach it.
const CEILING_LOOK = { colour: "--ink", dash: null, symbol: null, wide: true };
const LIMIT_LOOK = { colour: "--ink", dash: "5 4", symbol: null };
// Beyond eight, the colours again with other dashes and markers.
function look(index) {
  const [column, round] = [index % LOOKS.length, Math.floor(index / LOOKS.length)];
  const shifted = (step) => LOOKS[(column + step * round) % LOOKS.length];
  return { colour: LOOKS[column].colour, dash: shifted(3).dash, symbol: shifted(5).symbol };
}

function ruleLook(rule, others = []) {
  if (rule === "hard") return CEILING_LOOK;
  const known = RULE_LOOKS.indexOf(rule);
  return look(known >= 0 ? known : RULE_LOOKS.length + others.filter((o) => !RULE_LOOKS.includes(o)).indexOf(rule));
}

const summaryOf = (run) => run.results.summary;
const modelsOf = (run) => run.results.models;

// Every rule that some size has, in the order of the file, the ceiling last.
function rulesOf(run) {
  const rules = new Set();
  for (const size of summaryOf(run)) Object.keys(size.rules).forEach((rule) => rules.add(rule));
  const ceiling = rules.delete("hard");
  return ceiling ? [...rules, "hard"] : [...rules];
}

// Beside runs that were trained under another weighting, softmax is what the others were trained under.
function nameWhatTrained(runs) {
  if (!runs.some((run) => rulesOf(run).includes("trained"))) return;
  for (const run of runs) {
    for (const size of [summaryOf(run), ...modelsOf(run).map((model) => model.sizes)].flat()) {
      if (own(size.rules, "softmax")) size.rules.trained ??= size.rules.softmax;
    }
  }
}

const commonRules = (runs) => runs.map(rulesOf).reduce((a, b) => a.filter((rule) => b.includes(rule)));

// Points {x, y, low, high} of a rule's accuracy, in percent.
function accuracies(summary, rule) {
  return summary
    .map((size) => ({ x: size.items, entry: own(size.rules, rule) }))
    .filter(({ entry }) => isNumber(entry?.accuracy))
    .map(({ x, entry }) => {
      const y = 100 * entry.accuracy;
      const deviation = isNumber(entry.deviation) ? 100 * entry.deviation : null;
      return { x, y, deviation };
    });
}

// The mean over heads of what `value` picks from one head's size, as points against the size.
function meansOverHeads(run, value, pick = d3.mean) {
  const bySize = new Map();
  for (const model of modelsOf(run)) {
    for (const size of model.sizes) {
      const y = value(size);
      if (!isNumber(y)) continue;
      if (!bySize.has(size.items)) bySize.set(size.items, []);
      bySize.get(size.items).push(y);
    }
  }
  return [...bySize]
    .map(([x, values]) => ({ x, y: pick(values), deviation: values.length > 1 ? d3.deviation(values) : null }))
    .sort((a, b) => a.x - b.x);
}

const ofRule = (rule, field) => (size) => own(size.rules, rule)?.[field];

// Training: for each head points of step against field 1 (loss) or 2 (accuracy).
function curves(run, field) {
  return modelsOf(run)
    .map((model) => model.metrics.filter((m) => isNumber(m[field])))
    .filter((metrics) => metrics.length > 0)
    .map((metrics) => metrics.map((m) => ({ x: m[0], y: m[field] })));
}
