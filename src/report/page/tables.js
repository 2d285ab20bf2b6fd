// Tables of a reproduction, and its provenance.

// head: cells or rows of cells; a cell is text or {text, class, span, ...data attributes}.
function table(caption, head, rows) {
  const cell = (name) => (content) => {
    const { text: shown, span, ...attributes } = typeof content === "object" ? content : { text: content };
    return element(name, { ...attributes, ...(span ? { colspan: span } : {}), ...(name === "th" && !span ? { scope: "col" } : {}) }, shown);
  };
  const heads = Array.isArray(head[0]) ? head : [head];
  const made = element(
    "table",
    {},
    element("caption", {}, element("span", {}, caption)),
    element("thead", {}, ...heads.map((row) => element("tr", {}, ...row.map(cell("th"))))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))),
  );
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}

// ---- Table 1 of the paper beside ours

function addPaperTable(parent, run) {
  const rows = run.results.paper
    .map((line) => ({ line, size: summaryOf(run).find((size) => size.items === line.items) }))
    .filter(({ size }) => own(size?.rules, "paper") && own(size?.rules, "softmax"));
  if (rows.length === 0) {
    const lacks = rulesOf(run).includes("paper") ? "The paper’s Table 1 has none of these sizes." : "These results lack the paper’s rule.";
    parent.append(element("p", {}, lacks));
    return;
  }
  const marked = rows.flatMap(({ line, size }) => ["softmax", "paper"].map((rule) => beyond(own(size.rules, rule), line[rule])));
  parent.append(
    element("p", { class: "note" }, tableVerdict(marked, run)),
    table(
      "Accuracy, % of sets: mean ± standard deviation over heads",
      [
        ["", { text: "softmax", span: 2, class: "group" }, { text: "paper’s rule", span: 2, class: "group" }, { text: "p, paired", span: 2, class: "group" }],
        ["items", "here", "paper", "here", "paper", "here", "paper"],
      ],
      rows.map(({ line, size }) => [
        count(line.items),
        ...["softmax", "paper"].flatMap((rule) => [ourCell(size, rule, line[rule]), theirs(line[rule], 1)]),
        { text: pValue(own(size.rules, "paper").against_softmax.p), "data-items": line.items, "data-field": "p" },
        { text: pValue(line.p), class: "theirs" },
      ]),
    ),
  );
}

function tableVerdict(marked, run) {
  const heads = plural(modelsOf(run).length, "head");
  const known = marked.filter((m) => m !== null);
  if (known.length === 0) return `${heads}: without a deviation, nothing says what would be a difference.`;
  const far = known.filter((m) => m).length;
  if (far === 0) return `${heads}. Every number of the paper lies within two standard deviations of ours.`;
  return `${heads}. ${far} of ${known.length} numbers lie more than two of our standard deviations from the paper’s: ▲ above it, ▼ below.`;
}

// Whether ours is more than two deviations from the paper’s; null where it can't be said.
function beyond(entry, theirPercent) {
  if (!isNumber(entry?.accuracy) || !isNumber(entry.deviation) || !isNumber(theirPercent)) return null;
  return Math.abs(100 * entry.accuracy - theirPercent) > 200 * entry.deviation;
}

function ourCell(size, rule, theirPercent) {
  const entry = own(size.rules, rule);
  const differs = beyond(entry, theirPercent);
  const arrow = 100 * entry.accuracy > theirPercent ? "▲ " : "▼ ";
  return {
    text: (differs ? arrow : "") + withDeviation(entry),
    class: differs ? "differs" : "",
    "data-items": size.items,
    "data-field": rule,
  };
}

const theirs = (value, digits) => ({ text: isNumber(value) ? fixed(value, digits) : "–", class: "theirs" });

// ---- every rule

function addRuleTable(parent, run) {
  const rules = rulesOf(run);
  if (rules.length === 0) return;
  parent.append(
    element(
      "details",
      {},
      element("summary", {}, "Every rule as a table"),
      table(
        "Accuracy, % of sets: mean ± standard deviation over heads",
        ["items", ...rules.map(ruleName)],
        summaryOf(run).map((size) => [
          count(size.items),
          ...rules.map((rule) => ({ text: withDeviation(own(size.rules, rule)), "data-items": size.items, "data-rule": rule })),
        ]),
      ),
    ),
  );
}

// ---- several runs, as they were trained

// Rule and normalizer, and what else a recipe may change of the head.
function trainedWith({ rules, recipe }) {
  const changes = [recipe.activation === "step" ? "steps" : null, recipe.heads === 2 ? "two heads" : null];
  return [own(rules, "trained") ?? "softmax", ...changes].filter((change) => change !== null).join(", ");
}

// Under their own rule and normalizer, else plain softmax; the best at the largest size first.
function addRanking(parent, runs) {
  const sizes = runs.map((run) => summaryOf(run).map((size) => size.items)).reduce((a, b) => a.filter((items) => b.includes(items)));
  if (sizes.length === 0) return;
  const last = sizes[sizes.length - 1];
  const entry = (run, items, rule) => own(summaryOf(run).find((size) => size.items === items)?.rules, rule);
  const trained = (run) => (rulesOf(run).includes("trained") ? "trained" : "softmax");
  const score = (run) => entry(run, last, trained(run))?.accuracy ?? -1;
  // What no temperature mends: sets whose largest logit is of the wrong class.
  const ceilingOf = (run) =>
    d3.mean(modelsOf(run), (model) => model.sizes.find((size) => size.items === last)?.ranked ?? undefined) ?? entry(run, last, "hard")?.accuracy;
  const name = (run) => {
    const learned = modelsOf(run).filter((model) => !model.did_not_learn).length;
    return learned === modelsOf(run).length ? run.name : `${run.name} (${learned} of ${modelsOf(run).length} learned)`;
  };
  const ranked = [...runs].sort((a, b) => score(b) - score(a));
  parent.append(
    table(
      `Accuracy by size, % of sets, ± standard deviation over heads; then at ${count(last)} items: the ceiling, and points lost to dispersion and to misranking`,
      ["run", "trained with", ...sizes.map(count), "ceiling", "dispersion", "misranking", "median n*"],
      ranked.map((run) => {
        const [ceiling, accuracy] = [ceilingOf(run), entry(run, last, trained(run))?.accuracy];
        const resolutions = modelsOf(run).map((model) => model.diagnosis.resolution).filter(isNumber);
        return [
          { text: name(run), "data-run": run.name },
          trainedWith(modelsOf(run)[0]),
          ...sizes.slice(0, -1).map((items) => percent(entry(run, items, trained(run))?.accuracy)),
          withDeviation(entry(run, last, trained(run))),
          isNumber(ceiling) ? percent(ceiling) : "–",
          isNumber(ceiling) && isNumber(accuracy) ? percent(ceiling - accuracy) : "–",
          isNumber(ceiling) ? percent(1 - ceiling) : "–",
          short(d3.median(resolutions)),
        ];
      }),
    ),
  );
}

// ---- several runs, rule by rule

function addComparisonTable(parent, data) {
  const rules = commonRules(data.runs);
  if (rules.length === 0) return;
  const tables = element("div");
  const show = (rule) => tables.replaceChildren(...data.comparison.map((c) => differenceTable(data.runs, c, rule)));
  const first = ["target_entropy", "paper", "softmax"].find((rule) => rules.includes(rule)) ?? rules[0];
  parent.append(
    element("p", { class: "note" }, "Every run against the first, over the heads that share a seed. Marked: p below 0.05."),
    element("div", { class: "controls" }, choice("Rule", rules.map((rule) => [rule, ruleName(rule)]), first, show)),
    tables,
  );
  show(first);
}

function differenceTable(runs, comparison, rule) {
  const [base, other] = [runs[comparison.against], runs[comparison.run]];
  const seeds = comparison.seeds > 0 ? `paired over ${plural(comparison.seeds, "seed")}` : "no seed in common, so no test";
  return table(
    `${other.name} against ${base.name}, ${ruleName(rule)}: ${seeds}`,
    ["items", base.name, other.name, "difference, points", "95 % interval", "p"],
    comparison.sizes.map((size) => {
      const test = own(size.rules, rule);
      const entry = (run) => own(summaryOf(run).find((s) => s.items === size.items)?.rules, rule);
      const sure = isNumber(test?.p) && test.p < 0.05;
      return [
        count(size.items),
        withDeviation(entry(base)),
        withDeviation(entry(other)),
        { text: points(test?.difference), class: sure ? "differs" : "", "data-items": size.items, "data-field": "difference" },
        interval(test),
        pValue(test?.p),
      ];
    }),
  );
}

// ---- heads, recipe, machine

function addHeadTable(parent, run) {
  const models = modelsOf(run);
  for (const model of models.filter((m) => m.did_not_learn)) {
    parent.append(element("p", { class: "note" }, `Seed ${model.seed} did not learn: ${model.did_not_learn}.`));
  }
  parent.append(
    element(
      "details",
      {},
      element("summary", {}, `The ${plural(models.length, "head")}: what each can tell apart, its target, its fit`),
      table(
        "Resolution n*: the number of items beyond which a head’s order is lost",
        ["seed", "steps", "slope", "offsets’ deviation", "resolution n*", "target entropy", "fit: points", "R²"],
        models.map((model) => [
          String(model.seed),
          count(model.step),
          short(model.diagnosis.slope),
          short(model.diagnosis.deviation),
          short(model.diagnosis.resolution),
          short(Number(String(own(model.rules, "target_entropy") ?? "").split(":")[1] ?? NaN)),
          model.fit ? count(model.fit.points) : "–",
          short(model.fit?.r_squared),
        ]),
      ),
    ),
  );
}

// Names and values of an object as a list; objects inside as text; what differs from `others` marked.
function facts(object, others = object) {
  const shown = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));
  return element(
    "dl",
    {},
    ...Object.entries(object).flatMap(([name, value]) => {
      const differs = shown(value) !== shown(own(others, name));
      return [element("dt", {}, name), element("dd", differs ? { class: "differs" } : {}, shown(value))];
    }),
  );
}

// As the first head has it; the heads differ in their seed.
function recipeOf(run) {
  const { seed: ignored, ...recipe } = modelsOf(run)[0].recipe;
  return recipe;
}

function addOrigin(parent, runs) {
  for (const run of runs) {
    if (runs.length > 1) parent.append(element("h3", {}, run.name));
    const group = (title, content) => (content.childElementCount ? element("div", {}, element("h4", {}, title), content) : null);
    const marked = (of) => facts(of(run), of(runs[0]));
    parent.append(
      element(
        "div",
        { class: "facts" },
        group("Run", facts({ ...run.results.provenance, seeds: modelsOf(run).map((model) => model.seed).join(", ") })),
        group("Recipe", marked(recipeOf)),
        group("Evaluation", marked(({ results }) => results.options)),
      ),
    );
    addHeadTable(parent, run);
  }
}
