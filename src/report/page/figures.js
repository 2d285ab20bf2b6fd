// The figures of a reproduction. Of one run: one curve per rule. Of several: one curve per run, the rule by a switch.

const ITEMS = { label: "items in a set", log: true, base: 2, sizes: true };

// What to draw for each rule of one run, or for each run under one rule.
function ruleCurves(runs, state, rules, pointsOf) {
  if (runs.length === 1) {
    return rules.map((rule) => ({ name: ruleName(rule), points: pointsOf(runs[0], rule), look: ruleLook(rule, rules) }));
  }
  return runs.map((run, i) => ({ name: run.name, points: pointsOf(run, state.rule), look: look(i), band: true }));
}

// The switch that several runs need, wired to the figure that addWith makes.
function addWithRule(runs, rules, preferred, addWith) {
  const state = { rule: preferred.find((rule) => rules.includes(rule)) ?? rules[0] };
  const controls =
    runs.length === 1 || rules.length < 2
      ? []
      : [
          choice("Rule", rules.map((rule) => [rule, ruleName(rule)]), state.rule, (rule) => {
            state.rule = rule;
            figure.redraw();
          }),
        ];
  const figure = addWith(state, controls);
}

const ends = (points) => [points[0], points[points.length - 1]];

function fromTo(points, format, unit = "") {
  const [first, last] = ends(points);
  if (!first) return "";
  if (first === last) return `${format(first.y)}${unit} at ${plural(first.x, "item")}`;
  return `from ${format(first.y)}${unit} at ${plural(first.x, "item")} to ${format(last.y)}${unit} at ${count(last.x)}`;
}

function verb(points) {
  if (points.length < 2) return "is";
  const [first, last] = ends(points);
  return last.y < first.y ? "falls" : last.y > first.y ? "grows" : "goes";
}
const percentage = (y) => fixed(y, 1);

// ---- accuracy

function addAccuracy(parent, runs, summaryOfRun = summaryOf) {
  const rules = runs.length === 1 ? rulesOf(runs[0]) : commonRules(runs);
  const pointsOf = (run, rule) => accuracies(summaryOfRun(run), rule);
  addWithRule(runs, rules, runs.length === 1 ? ["softmax"] : ["trained", "softmax"], (state, controls) =>
    addLines(parent, {
      id: "accuracy",
      title: () => {
        const rule = runs.length === 1 ? (rules.includes("softmax") ? "softmax" : rules[0]) : state.rule;
        const points = pointsOf(runs[0], rule);
        const who = runs.length === 1 ? "" : ` of ${runs[0].name}`;
        return points.length ? `Accuracy${who} under ${ruleInSentence(rule)} ${verb(points)} ${fromTo(points, percentage, "\u00a0%")}` : "Accuracy";
      },
      note:
        runs.length === 1
          ? "The ceiling is the accuracy of picking the largest logit: what is missing above it, no temperature brings back."
          : "Shaded: one standard deviation over heads. Wide lines: the ceiling of each run, the accuracy of picking the largest logit.",
      alt: "Curves of accuracy in percent against the number of items, doubling.",
      controls,
      x: ITEMS,
      y: { label: "accuracy, % of sets", domain: () => [0, 100], format: percentage },
      series: () => [...ruleCurves(runs, state, rules, pointsOf), ...ceilings(runs, state, rules, pointsOf)],
    }),
  );
}

// Of several runs, each in the run's colour.
function ceilings(runs, state, rules, pointsOf) {
  if (runs.length === 1 || state.rule === "hard" || !rules.includes("hard")) return [];
  return runs.map((run, i) => ({
    name: `${run.name}, ceiling`,
    points: pointsOf(run, "hard"),
    look: { ...CEILING_LOOK, colour: look(i).colour },
  }));
}

// What each rule wins, where the curves of accuracy lie close together.
function addGains(parent, run) {
  const rules = rulesOf(run).filter((rule) => rule !== "softmax");
  if (rules.length === 0 || !rulesOf(run).includes("softmax")) return;
  const gainsOf = (rule) => {
    const plain = new Map(accuracies(summaryOf(run), "softmax").map((p) => [p.x, p.y]));
    return accuracies(summaryOf(run), rule)
      .filter((p) => plain.has(p.x))
      .map((p) => ({ x: p.x, y: p.y - plain.get(p.x) }));
  };
  const most = rules.filter((rule) => rule !== "hard").map((rule) => ({ rule, gains: gainsOf(rule) })).filter(({ gains }) => gains.length > 0);
  addLines(parent, {
    id: "gains",
    title: () => {
      const best = most.map(({ rule, gains }) => ({ rule, ...gains[d3.scan(gains, (a, b) => b.y - a.y)] }));
      const { rule, x, y } = best[d3.scan(best, (a, b) => b.y - a.y)] ?? {};
      return rule ? `Over softmax, ${ruleInSentence(rule)} wins most: ${signed(fixed(y, 1))} points at ${plural(x, "item")}` : "Points won over softmax";
    },
    note: "The same accuracies, less that of softmax.",
    alt: "Curves of the difference in accuracy from softmax, in points, against the number of items.",
    x: ITEMS,
    y: { label: "points over softmax", nice: false, domain: ([low, high]) => [Math.min(0, low) - 0.5, Math.max(1, high) + 0.5], format: (y) => signed(fixed(y, 1)) },
    series: () => rules.map((rule) => ({ name: ruleName(rule), points: gainsOf(rule), look: ruleLook(rule, rules) })),
  });
}

// ---- where the rest goes

const PARTS = [
  ["answered", "answered correctly", "--c0"],
  ["dispersion", "lost to dispersion: weight spread over others", "--c1"],
  ["misranking", "lost to misranking: the largest logit is another’s", "--rest"],
];

function addLosses(parent, runs) {
  const rules = commonRules(runs).filter((rule) => rule !== "hard");
  if (rules.length === 0 || !runs.every((run) => rulesOf(run).includes("hard"))) return;
  const state = { rule: ["trained", "softmax"].find((rule) => rules.includes(rule)) ?? rules[0], run: 0 };
  const values = () => lossesOf(runs[state.run], state.rule);
  const redraw = (field) => (value) => {
    state[field] = field === "run" ? Number(value) : value;
    figure.redraw();
  };
  const controls = [choice("Rule", rules.map((rule) => [rule, ruleName(rule)]), state.rule, redraw("rule"))];
  if (runs.length > 1) controls.push(choice("Run", runs.map((run, i) => [String(i), run.name]), "0", redraw("run")));
  const figure = addFigure(parent, {
    id: "losses",
    title: () => {
      const last = values()[values().length - 1];
      if (!last) return "Where accuracy is lost";
      const where = runs.length === 1 ? "Under" : `In ${runs[state.run].name} under`;
      return (
        `${where} ${ruleInSentence(state.rule)}, sets of ${plural(last.items, "item")} lose ${fixed(last.misranking, 1)} points ` +
        `to misranking and ${fixed(last.dispersion, 1).replace("-", "−")} to dispersion`
      );
    },
    note: "A rule can win back dispersion, never misranking. Below zero, averaging over several items helps the head.",
    alt: "Stacked bars of 100 percent for each number of items.",
    controls,
    draw: (svg, width) => drawLosses(svg, width, values()),
    rows: () => [
      ["run", "rule", "items", "answered, %", "dispersion, points", "misranking, points"],
      ...runs.flatMap((run) =>
        rules.flatMap((rule) => lossesOf(run, rule).map((v) => [run.name, rule, v.items, v.answered, v.dispersion, v.misranking])),
      ),
    ],
  });
}

function lossesOf(run, rule) {
  return summaryOf(run)
    .map((size) => ({ items: size.items, accuracy: own(size.rules, rule)?.accuracy, ceiling: own(size.rules, "hard")?.accuracy }))
    .filter(({ accuracy, ceiling }) => isNumber(accuracy) && isNumber(ceiling))
    .map(({ items, accuracy, ceiling }) => ({
      items,
      answered: 100 * accuracy,
      dispersion: 100 * (ceiling - accuracy),
      misranking: 100 * (1 - ceiling),
    }));
}

function drawLosses(svg, width, values) {
  let legend = 0;
  PARTS.forEach(([, name, colour]) => {
    const item = svg.append("g").attr("transform", `translate(0,${legend + 10})`);
    item.append("rect").attr("y", -6).attr("width", 25).attr("height", 11).style("fill", `var(${colour})`);
    shorten(item.append("text").attr("x", 32).attr("y", 4).text(name), width - 32);
    legend += LEGEND_ROW;
  });
  const top = legend + 34;
  const height = top + Math.max(190, Math.min(300, Math.round(width * 0.36))) + MARGIN.bottom;
  svg.attr("height", height);
  const x = d3
    .scaleBand()
    .domain(values.map((v) => v.items))
    .range([MARGIN.left, width - MARGIN.right])
    .padding(values.length > 60 ? 0 : 0.18);
  const y = d3.scaleLinear().domain([0, 100]).range([height - MARGIN.bottom, top]);
  drawAxes(svg, { x: { ...ITEMS }, y: { label: "% of sets" } }, centred(x), y, { width, height, top, values: x.domain() });
  for (const v of values) {
    // Where averaging helps, accuracy stands above the ceiling: the overlap is drawn in the accuracy’s favour.
    const kept = Math.min(v.answered, 100 - v.misranking);
    const bar = (from, to, colour) => {
      if (to - from <= 0) return;
      svg
        .append("rect")
        .attr("class", x.bandwidth() > 6 ? "part" : null)
        .attr("x", x(v.items))
        .attr("width", Math.max(0.5, x.bandwidth()))
        .attr("y", y(to))
        .attr("height", y(from) - y(to))
        .style("fill", `var(${colour})`);
    };
    bar(0, kept, PARTS[0][2]);
    bar(kept, 100 - v.misranking, PARTS[1][2]);
    bar(Math.max(v.answered, 100 - v.misranking), 100, PARTS[2][2]);
    bar(100 - v.misranking, v.answered, PARTS[0][2]);
  }
  const targets = values.map((v) => ({
    x: x(v.items) + x.bandwidth() / 2,
    y: top,
    title: `${count(v.items)} items`,
    lines: PARTS.map(([field, name, colour]) => ({ name: name.split(":")[0], value: fixed(v[field], 1), colour })).reverse(),
  }));
  return {
    targets,
    nearest: (px) => (targets.length ? d3.scan(targets, (a, b) => Math.abs(a.x - px) - Math.abs(b.x - px)) : -1),
    mark: (group, t) => group.append("line").attr("class", "cross").attr("x1", t.x).attr("x2", t.x).attr("y1", top).attr("y2", height - MARGIN.bottom),
  };
}

// A band scale that axes can ask for the middle of a band.
function centred(band) {
  const scale = (value) => band(value) + band.bandwidth() / 2;
  scale.copy = () => centred(band);
  scale.range = () => band.range();
  scale.domain = () => band.domain();
  return scale;
}

// ---- entropy

function addEntropy(parent, runs) {
  const rules = (runs.length === 1 ? rulesOf(runs[0]) : commonRules(runs)).filter((rule) => rule !== "hard");
  const pointsOf = (run, rule) => meansOverHeads(run, ofRule(rule, "entropy"));
  const uniform = () => ({
    name: "spread evenly: ln n",
    points: [...new Set(runs.flatMap((run) => summaryOf(run).map((size) => size.items)))].sort(d3.ascending).map((x) => ({ x, y: Math.log(x) })),
    look: LIMIT_LOOK,
  });
  addWithRule(runs, rules, runs.length === 1 ? ["softmax"] : ["trained", "softmax"], (state, controls) =>
    addLines(parent, {
      id: "entropy",
      title: () => {
        const points = pointsOf(runs[0], runs.length === 1 ? "softmax" : state.rule);
        const under = runs.length === 1 ? "Entropy of softmax" : `Entropy of ${runs[0].name} under ${ruleInSentence(state.rule)}`;
        return points.length ? `${under} ${verb(points)} ${fromTo(points, short, "\u00a0nats")}` : "Entropy against size";
      },
      note: "Softmax is before, the rules are after: what each leaves of the entropy. Means over sets and heads.",
      alt: "Curves of mean entropy in nats against the number of items.",
      controls,
      x: ITEMS,
      y: { label: "entropy, nats", domain: ([, high]) => [0, high] },
      series: () => [...ruleCurves(runs, state, rules, pointsOf), uniform()],
    }),
  );
}

// ---- the fit

const PAPER = { coefficients: [-0.037, 0.481, -2.3, 4.917, -1.791], gate: 0.5, hold: Infinity };

// As include/whet/rule.h has it: 1 up to the gate, never below 1, held beyond the last entropy of the fit.
function polynomialBeta({ coefficients, gate, hold }, entropy) {
  if (entropy <= gate) return 1;
  return Math.max(1, coefficients.reduce((sum, c) => sum * Math.min(entropy, hold) + c, 0));
}

function fitOf(run) {
  const { fit } = modelsOf(run)[0];
  return fit ? { coefficients: fit.coefficients, gate: fit.lowest_entropy, hold: fit.highest_entropy } : null;
}

function addFit(parent, runs) {
  const dots = () =>
    (runs.length === 1 ? runs[0].results.fit_scatter : [])
      .filter((p) => isNumber(p[0]) && p[1] > 0)
      .map(([x, y]) => ({ x, y }));
  const fits = runs.map((run, i) => ({ run, i, fit: fitOf(run) })).filter(({ fit }) => fit);
  if (fits.length === 0 && dots().length === 0) return;
  const reach = d3.max([
    6,
    d3.max(dots(), (p) => p.x),
    d3.max(runs.flatMap((run) => meansOverHeads(run, (size) => size.entropy).map((p) => p.y))),
  ]);
  const grid = [...d3.range(0, 121).map((i) => (reach * i) / 120), ...fits.map(({ fit }) => Math.min(fit.hold, reach))].sort(d3.ascending);
  const curve = (polynomial, from, to) =>
    grid.filter((x) => x >= from && x <= to).map((x) => ({ x, y: polynomialBeta(polynomial, x) }));
  const series = () => [
    { name: "paper’s polynomial", points: curve(PAPER, 0, reach), look: runs.length === 1 ? LOOKS[1] : LIMIT_LOOK, smooth: true },
    ...fits.flatMap(({ run, i, fit }) => {
      const name = runs.length === 1 ? "this run’s" : run.name;
      const l = { ...(runs.length === 1 ? LOOKS[4] : look(i)), dash: null };
      const held = Math.min(fit.hold, reach);
      return [
        { name, points: curve(fit, 0, held), look: l, smooth: true },
        { name: `${name}, held`, points: curve(fit, held, reach), look: { ...l, dash: "2 3" }, smooth: true, unlisted: runs.length > 1 },
      ];
    }),
  ];
  const first = modelsOf(runs[0])[0].fit;
  addLines(parent, {
    id: "fit",
    title: () =>
      runs.length === 1 && isNumber(first?.r_squared)
        ? `Entropy says little about the best temperature: the fit explains ${percent(first.r_squared)}\u00a0% of its variance`.replace(
            "says little",
            first.r_squared < 0.3 ? "says little" : "says something",
          )
        : "The inverse temperature that each fit gives an entropy",
    note:
      (dots().length ? "A dot is a set that softmax misranks: its entropy and the β that would have served it best. " : "") +
      (everyNth(dots()) > 1 ? `One of ${count(everyNth(dots()))} is drawn; the CSV has all. ` : "") +
      "A fit of ours keeps its value beyond the last entropy it saw; the paper’s switches itself off above 5.9 nats. " +
      "First head of a run.",
    alt: "Scatter of the best inverse temperature against entropy, with two polynomials.",
    x: { label: "entropy, nats", domain: () => [0, reach], nice: false, title: (h) => `entropy ${fixed(h, 2)} nats` },
    y: { label: "inverse temperature β", log: true, format: (b) => fixed(b, 2) },
    series,
    dots,
    dotsName: dots().length ? "best β of a set" : undefined,
  });
}

// ---- largest weight

function addLargestWeight(parent, runs) {
  const field = (run, name, pick) => meansOverHeads(run, (size) => size[name], pick).map(({ x, y }) => ({ x, y }));
  const mean = (run) => meansOverHeads(run, ofRule("softmax", "peak"));
  const sharp = ["paper", "target_entropy"].filter((rule) => runs.length === 1 && rulesOf(runs[0]).includes(rule));
  const series = () =>
    runs.length === 1
      ? [
          { name: "bound of the spread", points: field(runs[0], "weight_bound", d3.max), look: CEILING_LOOK },
          { name: "paper’s bound", points: field(runs[0], "paper_bound", d3.max), look: { colour: "--c3", dash: "8 3 2 3", symbol: null } },
          { name: "softmax, any set", points: field(runs[0], "largest_weight", d3.max), look: { ...LOOKS[5] } },
          { name: "softmax, mean", points: mean(runs[0]), look: ruleLook("softmax") },
          ...sharp.map((rule) => ({ name: `${ruleName(rule)}, mean`, points: meansOverHeads(runs[0], ofRule(rule, "peak")), look: ruleLook(rule) })),
        ]
      : runs.flatMap((run, i) => [
          { name: run.name, points: mean(run), look: look(i) },
          { name: `${run.name}, bound`, points: field(run, "weight_bound", d3.max), look: { colour: look(i).colour, dash: "2 3", symbol: null } },
        ]);
  addLines(parent, {
    id: "largest-weight",
    title: () => {
      const points = mean(runs[0]);
      const where = runs.length === 1 ? "" : ` in ${runs[0].name}`;
      return points.length ? `The largest weight of softmax${where} ${verb(points)} ${fromTo(points, short)}` : "Largest weight against size";
    },
    note: "The bounds hold for every row of the spread that was measured: as n grows, no key can stay above them.",
    alt: "Curves of the largest weight in a set against the number of items, with upper bounds.",
    x: ITEMS,
    y: { label: "largest weight", log: true, domain: ([low]) => [Math.min(low / 1.15, 0.5), 1.03] },
    series,
  });
}

// ---- calibrated heads

const CALIBRATIONS = { classes: "keys calibrated with class labels", pairs: "keys calibrated from pairs" };

function addCalibrated(parent, runs) {
  const run = runs[0];
  const calibrated = run.results.calibrated_summary;
  if (!calibrated || runs.length > 1) return;
  const versions = Object.keys(calibrated);
  const rules = rulesOf(run).filter((rule) => versions.every((v) => calibrated[v].some((size) => own(size.rules, rule))));
  if (rules.length === 0) return;
  const state = { rule: ["target_entropy", "hard", "softmax"].find((rule) => rules.includes(rule)) ?? rules[0] };
  const last = (summary) => ends(accuracies(summary, state.rule))[1];
  const figure = addLines(parent, {
    id: "calibrated",
    title: () => {
      const [before, after] = [last(summaryOf(run)), last(calibrated[versions[0]])];
      if (!before || !after) return "Accuracy of calibrated heads";
      return `With calibrated keys, ${ruleInSentence(state.rule)} answers ${fixed(after.y, 1)}\u00a0% of sets of ${plural(after.x, "item")}, not ${fixed(before.y, 1)}\u00a0%`;
    },
    note: "Calibration makes the keys blind to what isn’t priority, so that misranking goes; a rule then takes away dispersion.",
    alt: "Curves of accuracy against the number of items, before and after calibration.",
    controls: [
      choice("Rule", rules.map((rule) => [rule, ruleName(rule)]), state.rule, (rule) => {
        state.rule = rule;
        figure.redraw();
      }),
    ],
    x: ITEMS,
    y: { label: "accuracy, % of sets", domain: () => [0, 100], format: percentage },
    series: () => [
      { name: "as trained", points: accuracies(summaryOf(run), state.rule), look: LOOKS[0] },
      ...versions.map((v, i) => ({ name: CALIBRATIONS[v], points: accuracies(calibrated[v], state.rule), look: look(i + 1) })),
    ],
  });
}

// ---- training

function addTraining(parent, runs) {
  if (!runs.some((run) => curves(run, 1).length > 0)) return;
  const pair = element("div", { class: "pair" });
  parent.append(pair);
  const one = (id, field, axis, title) =>
    addLines(pair, {
      id,
      title,
      alt: "One curve per head, against steps of training.",
      x: { label: "steps", title: (step) => `step ${count(step)}` },
      y: axis,
      series: () =>
        runs.flatMap((run, i) => {
          const heads = curves(run, field);
          const single = runs.length === 1 && heads.length <= 8;
          return heads.map((points, h) => ({
            name: runs.length === 1 ? `seed ${modelsOf(run)[h].seed}` : run.name,
            points,
            look: { ...look(single ? h : i), symbol: null, dash: null },
            thin: true,
            unlisted: runs.length === 1 ? !single : h > 0,
          }));
        }),
    });
  const end = (field) => d3.mean(runs.flatMap((run) => curves(run, field).map((points) => ends(points)[1].y)));
  const heads = d3.sum(runs, (run) => curves(run, 1).length);
  one("training-loss", 1, { label: "loss, nats", log: true, format: short }, `Loss of ${plural(heads, "head")} while training: ${short(end(1))} at the end`);
  const [low] = d3.extent(runs.flatMap((run) => curves(run, 2).flatMap((points) => points.map((p) => p.y))));
  one(
    "training-accuracy",
    2,
    { label: "accuracy on training sets, share", domain: () => [Math.min(low ?? 0, 0.9), 1], format: (y) => fixed(y, 3) },
    `Accuracy while training: ${percent(end(2))}\u00a0% at the end`,
  );
}
