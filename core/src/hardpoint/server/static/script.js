"use strict";

const POLL_SECONDS = 2;
const HISTORY = 60;
const KEY = "hardpoint-api-key";

const at = (id) => document.getElementById(id);
const messages = [];
let model = "";
let answering = null;
let explained = false;

/** Make an element: its class, its text, and what is in it. */
function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

/** Ask the server; throws an Error with what it says was wrong. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) {
    at("key-form").hidden = false;
    if (key) at("key-note").textContent = "The key that was given is not one of this server's.";
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let said = text;
  try {
    said = JSON.parse(text).error.message;
  } catch { /* a proxy's answer, not the server's: shown as it is */ }
  throw new Error(`${answer.status}: ${said}`);
}

/** The data of each server-sent event of an answer, until [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** A turn in the conversation's log. */
function addTurn(role, text) {
  const log = at("log");
  log.querySelector(".empty")?.remove();
  const body = make("p", "text", text);
  const turn = make("div", `turn ${role}`, "", make("div", "who", role === "user" ? "You" : model), body);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return { turn, body };
}

/** Send the conversation and show the answer as it comes. */
async function answer() {
  const log = at("log");
  const { turn, body } = addTurn("assistant", "");
  const facts = make("p", "facts");
  turn.append(facts);
  answering = new AbortController();
  setAnswering(true);
  const began = performance.now();
  let thought = null;
  try {
    const reply = await ask("v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: model || undefined,
        messages,
        max_tokens: at("max-tokens").valueAsNumber,
        temperature: at("temperature").valueAsNumber,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (delta.reasoning_content) {
        if (!thought) {
          thought = make("p");
          body.before(make("details", "", "", make("summary", "", "Reasoning"), thought));
        }
        thought.append(delta.reasoning_content);
      }
      if (delta.content) body.append(delta.content);
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        const count = event.usage.completion_tokens;
        facts.textContent = `${count} tokens in ${seconds.toFixed(2)} s`;
      }
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    facts.textContent = error.name === "AbortError" ? "stopped" : error.message;
    facts.classList.toggle("failed", error.name !== "AbortError");
  }
  if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
  else messages.pop(); // what nobody answered is not said again
  setAnswering(false);
  answering = null;
}

function setAnswering(on) {
  at("log").setAttribute("aria-busy", String(on));
  at("send").disabled = on;
  at("clear").disabled = on;
  at("stop").hidden = !on;
}

/** The samples of Prometheus's text, summed by name. */
function readMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^([a-z_0-9]+)(?:\{.*\})? (\S+)$/.exec(line);
    if (found) values[found[1]] = (values[found[1]] ?? 0) + Number(found[2]);
  }
  return values;
}

const history = [];
let last = null;

function showMetrics(values) {
  const now = performance.now() / 1000;
  const drawn = values.hardpoint_generated_tokens_total;
  if (drawn === undefined) return; // the engine is loading, or busy
  if (last && drawn >= last.drawn) {
    const rate = (drawn - last.drawn) / (now - last.now);
    history.push(rate);
    if (history.length > HISTORY) history.shift();
    at("rate").textContent = rate.toLocaleString("en", { maximumFractionDigits: rate < 10 ? 1 : 0 });
    const most = Math.max(1, ...history);
    const points = history.map((each, index) =>
      `${((HISTORY - history.length + index) * 120) / (HISTORY - 1)},${31 - (30 * each) / most}`);
    at("history").querySelector("polyline").setAttribute("points", points.join(" "));
  }
  last = { drawn, now };
  const used = 1 - values.hardpoint_free_cache_pages / values.hardpoint_cache_pages;
  const shown = {
    running: values.hardpoint_running_requests,
    waiting: values.hardpoint_waiting_requests,
    cache: `${(100 * used).toFixed(1)} %`,
    generated: drawn,
    hits: values.hardpoint_cached_tokens_total,
    preemptions: values.hardpoint_preemptions_total,
  };
  for (const [id, value] of Object.entries(shown)) at(id).textContent = value.toLocaleString("en");
}

/** The table of what serves what, with the reasons against the others. */
function showTable(rows) {
  const body = at("rows");
  body.replaceChildren();
  for (const row of rows) {
    const reasons = row.rejected.map((each) =>
      make("li", "", `${each.name} (${each.plugin}): ${each.reasons.map((reason) => reason.message).join("; ")}`));
    const why = reasons.length
      ? make("details", "", "", make("summary", "", String(reasons.length)), make("ul", "", "", ...reasons))
      : "none";
    const cells = [row.of ? `${row.family} ${row.of}` : row.family, row.chosen, row.plugin, row.range, row.rule, why];
    const line = make("tr");
    cells.forEach((value, index) => {
      const cell = make("td", index === 5 ? "why" : "", "", make("span", "", "", value));
      cell.dataset.label = ["Part", "Served by", "Plugin", "For", "Chosen by", "Not chosen"][index];
      line.append(cell);
    });
    body.append(line);
  }
  filterTable();
}

function filterTable() {
  const words = at("filter").value.toLowerCase().split(/\s+/);
  const lines = [...at("rows").children];
  for (const line of lines) {
    const cells = [...line.children].slice(0, 5).map((cell) => cell.textContent.toLowerCase()).join(" ");
    line.hidden = !words.every((word) => cells.includes(word));
  }
  at("count").textContent = `${lines.filter((line) => !line.hidden).length} of ${lines.length}`;
}

function showStatus(state) {
  if (at("status").dataset.state === state && at("status").textContent === state) return;
  at("status").dataset.state = state;
  at("status").textContent = state;
}

async function poll() {
  if (document.hidden) return;
  let state = "unreachable";
  try {
    state = (await (await fetch("health")).json()).status;
    if (state !== "ready") explained = false; // an engine that is built again may choose otherwise
    if (state === "ready" && !explained) {
      model = (await (await ask("v1/models")).json()).data[0].id;
      at("model").textContent = model;
      showTable((await (await ask("v1/hardpoint/explain")).json()).rows);
      explained = true;
      at("key-form").hidden = true;
    }
    if (explained) showMetrics(readMetrics(await (await ask("metrics")).text()));
  } catch { /* the state says it, and a key is asked for where one is missing */ }
  showStatus(state);
}

async function keepPolling() {
  await poll();
  setTimeout(keepPolling, POLL_SECONDS * 1000);
}

at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("message").value.trim();
  if (!text || answering) return;
  at("message").value = "";
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  answer();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("chat-form").requestSubmit();
});
at("stop").addEventListener("click", () => answering?.abort());
at("clear").addEventListener("click", () => {
  messages.length = 0;
  at("log").replaceChildren(make("p", "quiet empty", "Nothing has been said yet."));
  at("message").focus();
});
at("filter").addEventListener("input", filterTable);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  poll();
});
keepPolling();
