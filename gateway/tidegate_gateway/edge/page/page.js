// The status page: asks for the state once a second and shows it.

import { $, bar, h, number, percent, seconds, sum, svg, table } from "./page_dom.js";
import { hasKey, headers, setUp } from "./page_request.js";

const PERIOD_MS = 1000;
const SHOWN_ENGINES = 16;
let state = null;
let allEngines = false;
let keys = 0; // changes of the key; an answer to a request with an earlier key is not shown

async function ask() {
  const asked = keys;
  const answer = await fetch("v1/state", { headers: headers({}), cache: "no-store" });
  if (asked !== keys) return;
  const locked = answer.status === 401 || answer.status === 403;
  $("key-form").hidden = !locked;
  $("forget-key").hidden = !hasKey();
  if (locked) $("main").hidden = true;
  const found = await answer.json();
  if (asked !== keys) return;
  if (!answer.ok) throw new Error(found.error.message);
  state = found;
  $("trouble").hidden = true;
  show();
}

async function loop() {
  if (!document.hidden) {
    try {
      await ask();
    } catch (error) {
      $("trouble").textContent = `The gateway does not show its state: ${error.message}`;
      $("trouble").hidden = false;
    }
  }
  setTimeout(loop, PERIOD_MS);
}

function show() {
  const { policy, workflows } = state;
  for (const section of document.querySelectorAll("[data-needs]")) {
    section.hidden = (section.dataset.needs === "switches" ? policy.switches : state[section.dataset.needs]) === undefined;
  }
  $("main").hidden = false;
  $("request-section").hidden = !state.takes_calls;
  $("status").textContent = [state.status, ...state.reasons].join(": ");
  $("status").className = `chip ${state.status === "ready" ? "good" : state.status === "degraded" ? "fair" : "bad"}`;
  $("model").dataset.name = state.model ?? "";
  $("model").textContent = [state.model ?? "no model yet", state.scope.tenant && `tenant ${state.scope.tenant}`].filter(Boolean).join(", ");
  $("updated").textContent = `updated ${new Date(state.at).toLocaleTimeString()}`;
  $("tiles").replaceChildren(...tiles());
  $("tenants").replaceChildren(tenants(state.tenants));
  $("recent").replaceChildren(recent(state.recent));
  $("workflows").replaceChildren(...timelines(workflows.newest));
  $("workflow-counts").textContent = "";
  $("class-names").replaceChildren();
  if (state.engines === undefined) return;
  $("workflow-counts").textContent = `${workflows.active} active, ${workflows.waiting} wait${workflows.limit === null || workflows.limit === undefined ? "" : `, at most ${workflows.limit} at a time`}; the newest are shown`;
  $("throughput").replaceChildren(throughput(state.throughput));
  $("classes").replaceChildren(classes(state.classes));
  $("class-names").replaceChildren(...state.classes.map((each) => Object.assign(h("option"), { value: each.name })));
  $("policy-source").textContent = policy.source === "override" ? "set by a person" : policy.source === "steered" ? "chosen by steering" : "from the settings";
  const left = policy.left_s === null ? "" : `, ${seconds(policy.left_s)} left`;
  $("policy").replaceChildren(h("b", "", policy.name), ` for ${seconds(policy.since_s)}${left}: ${policy.reason}`);
  $("switches").replaceChildren(switches(policy.switches));
  $("queue").replaceChildren(queue(state.queue));
  showEngines();
}

function tiles() {
  const tile = (value, label, tone) => h("div", "tile", h("b", tone ?? "", value), h("span", "", label));
  const own = (state.classes ?? state.tenants).map((each) => each.lately);
  const targets = sum(own, (each) => each.with_target);
  const met = targets ? sum(own, (each) => each.met) / targets : null;
  const made = [tile(percent(met), `of ${number(targets)} targets met, 5 min`, tone(met, state.objective))];
  if (state.engines === undefined) return [...made, tile(state.policy.name, "policy")];
  const budgets = state.classes.map((each) => each.budget_left).filter((left) => left !== null);
  const budget = budgets.length ? Math.min(...budgets) : null;
  const { throughput: seen, calls, engines } = state;
  const lately = (series) => sum(series.slice(-7, -1), (step) => step) / (6 * seen.step_s); // the last step is not over
  const serving = engines.filter((each) => each.accepting).length;
  return [
    ...made,
    tile(percent(budget), "error budget left, worst class", budget === null ? "" : budget > 0.25 ? "good" : budget > 0 ? "fair" : "bad"),
    tile(number(lately(seen.answered)), "answers/s (30 s)"),
    tile(number(lately(seen.tokens)), "tokens/s (30 s)"),
    tile(number(calls.waiting), "calls wait here", calls.waiting > 100 ? "fair" : ""),
    tile(number(calls.out), "calls at engines"),
    tile(`${serving} / ${engines.length}`, "engines serve", serving === engines.length ? "" : "bad"),
    tile(state.policy.name, "policy"),
  ];
}

const tone = (met, objective = 0.95) => (met === null ? "" : met >= objective ? "good" : met >= objective - 0.1 ? "fair" : "bad");

function throughput({ answered, missed, step_s }) {
  const most = Math.max(...answered, ...missed, 1), width = 1200, height = 90, step = width / answered.length;
  const column = (value, index, kind) => svg("rect", { class: kind, x: index * step + 1, width: step - 2, y: height - (value / most) * (height - 14), height: (value / most) * (height - 14) });
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "answered calls" });
  drawn.append(svg("line", { class: "grid", x1: 0, x2: width, y1: height, y2: height }));
  answered.forEach((value, index) => {
    const shown = svg("g", {}, column(value, index, "step"), column(Math.min(missed[index], most), index, "missed"));
    shown.append(svg("title", {}, `${(answered.length - 1 - index) * step_s} s ago: ${value} answered, ${missed[index]} targets not met`));
    drawn.append(shown);
  });
  drawn.append(svg("text", { x: 0, y: 10 }, `${number(most / step_s)} / s`));
  return drawn;
}

function classes(rows) {
  const heads = ["class", "targets met", "#wanted", "#met", "#late", "#shed", "#failed", "#answer s", "#waiting", "#budget left"];
  return table(heads, rows.map(({ name, lately: seen, waiting, objective, budget_left }) => [
    name,
    h("div", "gauge", bar([[seen.met_ratio ?? 0, tone(seen.met_ratio, objective)]], objective), h("small", "", percent(seen.met_ratio))),
    percent(objective), seen.met, seen.late, seen.shed, seen.failed, seen.answer_s, waiting,
    h("b", budget_left === null ? "" : budget_left > 0.25 ? "good" : budget_left > 0 ? "fair" : "bad", percent(budget_left)),
  ]));
}

function switches(rows) {
  const time = (row) => `${new Date(row.at).toLocaleTimeString()} (${seconds(row.ago_s)} ago)`;
  return table(["time", "switch", "reason", "alternatives", "evidence: 60 s before", "expected", "effect: 60 s after"],
    rows.map((row) => [time(row), `${row.from} → ${row.to}`, row.reason, row.alternatives.join(", "), row.evidence, row.expected, row.effect]));
}

const load = (engine) => (engine.calls + engine.calls_of_others) / (engine.cap || Math.max(engine.calls + engine.calls_of_others, 1));

function showEngines() {
  if (!state?.engines) return;
  const { engines } = state;
  const wanted = $("engine-filter").value.trim().toLowerCase(), by = $("engine-sort").value;
  const condition = (each) => (each.accepting ? "serves" : each.reason || "takes no calls");
  const found = engines.filter((each) => [each.name, each.node_pool, each.policy, condition(each)].join(" ").toLowerCase().includes(wanted));
  const key = { trouble: (each) => (each.accepting ? load(each) : Infinity), load }[by] ?? ((each) => each[by] ?? -1);
  if (by !== "name") found.sort((one, other) => (key(other) > key(one)) - (key(other) < key(one)));
  const shown = allEngines ? found : found.slice(0, SHOWN_ENGINES);
  $("engine-counts").textContent = `${engines.filter((each) => each.accepting).length} of ${engines.length} serve; ${shown.length} of ${found.length} shown`;
  $("engine-more").hidden = found.length <= SHOWN_ENGINES;
  $("engine-more").textContent = allEngines ? `show ${SHOWN_ENGINES}` : `show all ${found.length}`;
  const pools = Map.groupBy(engines, (each) => each.node_pool);
  const several = pools.size > 1 || engines.length > SHOWN_ENGINES;
  $("node-pools").replaceChildren(...(several ? [table(["node pool", "#engines", "#serve", "load", "#running", "#waiting", "#backlog s, mean"],
    [...pools].map(([name, group]) => [
      name || "no name", group.length, group.filter((each) => each.accepting).length,
      bar([[sum(group, load) / group.length, ""]]),
      sum(group, (each) => each.running), sum(group, (each) => each.waiting), sum(group, (each) => each.backlog_s) / group.length,
    ]))] : []));
  $("engines").replaceChildren(table(["engine", "node pool", "state", "load: here, others", "#sent / most", "#running", "#waiting", "lanes", "KV cache", "#backlog s", "policy"],
    shown.map((each) => [
      each.simulated ? `${each.name} (simulated ${each.simulated})` : each.name,
      each.node_pool,
      h("span", each.accepting ? "good" : "bad", condition(each)),
      bar([[each.calls / (each.cap || Math.max(each.calls + each.calls_of_others, 1)), ""], [each.calls_of_others / (each.cap || Math.max(each.calls + each.calls_of_others, 1)), "others"]]),
      `${each.calls + each.calls_of_others} / ${each.cap ?? "any"}`,
      each.running, each.waiting, Object.entries(each.lanes).map(([name, calls]) => `${name}: ${number(calls)}`).join(", "),
      h("div", "gauge", bar([[each.kv_usage ?? 0, each.kv_usage > 0.9 ? "bad" : ""]]), h("small", "", percent(each.kv_usage))),
      each.backlog_s,
      each.fallback ? `vLLM's own: ${each.fallback}` : each.policy,
    ])));
}

function queue({ lanes, held }) {
  const rows = [...Object.entries(lanes), ...(held ? [["held back: tenant share or workflow bound", held]] : [])];
  const most = Math.max(1, ...rows.map(([, calls]) => calls));
  return rows.length ? table(["lane", "", "#calls"], rows.map(([name, calls]) => [name, bar([[calls / most, ""]]), calls])) : h("p", "dim", "no call waits");
}

function tenants(rows) {
  return table(["tenant", "share", "#answered", "#tokens", "#targets met", "#answer s", "#waiting"], rows.map((each) => [
    each.name, h("div", "gauge", bar([[each.share ?? 0, ""]], undefined, percent(each.share))),
    each.lately.answered, each.lately.tokens, percent(each.lately.met_ratio), each.lately.answer_s, each.waiting,
  ]));
}

function timelines(rows) {
  if (rows === null) return [h("p", "dim", "no store answers, so there are no workflows")];
  if (!rows.length) return [h("p", "dim", "nothing yet")];
  return rows.map((flow) => {
    const whole = Math.max(flow.deadline_ms, flow.elapsed_ms, 1), lane = h("div", "lane");
    const put = (element, from, length) => {
      element.style.left = `${(100 * from) / whole}%`;
      if (length !== undefined) element.style.width = `${(100 * Math.min(length, whole - from)) / whole}%`;
      lane.append(element);
    };
    for (const stage of flow.stages) {
      if (stage.start_ms === null) continue;
      if (stage.share_ms !== null) put(h("s"), stage.start_ms, stage.share_ms);
      const block = h("div", stage.state === "running" ? "running" : stage.slack_ms < 0 ? "bad" : "", stage.name);
      const slack = stage.slack_ms === null ? "" : `, slack ${seconds(stage.slack_ms / 1000)}`;
      block.title = `${stage.name}: ${stage.state}, took ${seconds(stage.time_ms / 1000)}${slack}, ${stage.calls_done} calls done, ${stage.calls_running} running`;
      put(block, stage.start_ms, stage.time_ms ?? 0);
    }
    put(h("u"), flow.deadline_ms);
    const outcome = flow.outcome ?? flow.state;
    const tones = { met: "good", running: "fair", cancelled: "dim" };
    const name = h("div", "name", flow.id, h("span", "dim", ` ${[flow.tenant, flow.template].filter(Boolean).join(", ")}`));
    name.title = name.textContent;
    const end = flow.left_ms < 0 ? `${seconds(-flow.left_ms / 1000)} over` : `${seconds(flow.left_ms / 1000)} left`;
    return h("div", "flow", name, lane, h("div", "end", h("span", `chip ${tones[outcome] ?? "bad"}`, outcome), h("span", "dim", `${end} of ${seconds(flow.deadline_ms / 1000)}`)));
  });
}

function recent(rows) {
  return table(["call", "#ago s", "tenant", "class", "engine", "#queue s", "#engine wait s", "#work s", "#slack s"], rows.map((each) => [
    each.call.slice(-8), each.ago_s, each.tenant, each.class, each.engine, each.queue_s, each.engine_wait_s, each.service_s,
    h("span", each.slack_s < 0 ? "bad" : "", each.slack_s),
  ]));
}

$("engine-filter").addEventListener("input", showEngines);
$("engine-sort").addEventListener("change", showEngines);
$("engine-more").addEventListener("click", () => {
  allEngines = !allEngines;
  showEngines();
});
setUp(() => {
  keys += 1;
  $("main").hidden = true; // until the state that the new key may see is here
  ask().catch((error) => {
    $("main").hidden = true;
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
  });
});
loop();
