// The box that sends a request and shows the answer as it streams, and the API key of this tab.

import { $, h } from "./page_dom.js";

const KEY = "tidegate-api-key";
let running = null;

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...more, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
}

export function setUp(again) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key").value = "";
    again();
  });
  $("forget-key").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    again();
  });
  $("request").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("cancel").addEventListener("click", () => running?.abort());
}

async function send() {
  if (running) return;
  running = new AbortController();
  $("send").disabled = true;
  $("cancel").hidden = false;
  $("answer").className = "";
  $("answer").textContent = "";
  $("answer-facts").textContent = "sent";
  const began = performance.now();
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: headers({ "content-type": "application/json", ...labels() }),
      body: JSON.stringify({
        model: $("model").dataset.name,
        messages: [{ role: "user", content: $("prompt").value }],
        max_tokens: Number($("max-tokens").value) || 48,
        stream: true,
      }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const told = (name, unit) => (answer.headers.get(name) === null ? "–" : `${answer.headers.get(name)}${unit}`);
    const facts = `engine ${told("x-tidegate-engine", "")}, queue ${told("x-tidegate-queue-ms", " ms")}, slack ${told("x-tidegate-slack-ms", " ms")}`;
    $("answer-facts").textContent = facts;
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      $("answer").append(event.choices?.[0]?.delta?.content ?? "");
    }
    $("answer-facts").textContent = `${facts}, done after ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    $("answer").className = "bad";
    $("answer").append(h("span", "", running.signal.aborted ? " (cancelled)" : error.message));
    $("answer-facts").textContent = "";
  }
  running = null;
  $("send").disabled = false;
  $("cancel").hidden = true;
}

function labels() {
  const fields = {
    "x-tidegate-tenant": "tenant",
    "x-tidegate-class": "slo-class",
    "x-tidegate-workflow": "workflow",
    "x-tidegate-stage": "stage",
    "x-tidegate-deadline-ms": "deadline",
  };
  const given = Object.entries(fields).map(([header, id]) => [header, $(id).value.trim()]);
  return Object.fromEntries(given.filter(([, value]) => value));
}

// The events of a stream as objects, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
