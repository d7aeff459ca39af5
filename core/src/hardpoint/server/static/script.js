import { begin, conversations, forget, keep, keepSettings, settings } from "./conversations.js";
import { markdown } from "./markdown.js";

const POLL_SECONDS = 2;
const HISTORY = 60;
const KEY = "hardpoint-api-key";

const at = (id) => document.getElementById(id);
let conversation = begin();
let model = "";
let contextTokens = null;
let edited = null;
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

/** A button of a turn or a block of code. */
function small(text, label, act) {
  const button = make("button", "small", text);
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", () => act(button));
  return button;
}

/** Copy `text`, and have `button` say so. Pages that are neither local nor encrypted have no clipboard of their own. */
async function copy(text, button) {
  const before = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else {
      const area = make("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

const codeButton = (code) => small("Copy", "Copy the code", (button) => copy(code, button));

/** Show a message at the end of the log; returns what an answer is written into. */
function addTurn(message, index) {
  const log = at("log");
  log.querySelector(".empty")?.remove();
  const isUser = message.role === "user";
  const body = make("div", "text");
  const thought = make("p");
  const reasoning = make("details", "", "", make("summary", "", "Reasoning"), thought);
  const facts = make("p", "facts");
  const buttons = make("div", "buttons");
  const turn = make("div", `turn ${message.role}`, "", make("div", "who", isUser ? "You" : model), reasoning, body, facts, buttons);
  turn.dataset.index = index;
  log.append(turn);
  const shown = { turn, body, thought, reasoning, facts, buttons };
  showMessage(shown, message);
  addButtons(shown, message, index);
  log.scrollTop = log.scrollHeight;
  return shown;
}

function showMessage({ body, thought, reasoning, facts }, message) {
  reasoning.hidden = !message.reasoning;
  if (thought.textContent !== (message.reasoning ?? "")) thought.textContent = message.reasoning ?? "";
  if (message.role === "user") body.textContent = message.content;
  else body.replaceChildren(markdown(message.content, codeButton));
  facts.replaceChildren();
  if (message.facts) facts.append(...factsOf(message.facts));
}

/** What an answer took, and how much of the model's context the conversation fills. */
function factsOf({ tokens, prompt, seconds, first, rate, note }) {
  const parts = [];
  if (tokens !== undefined) {
    const said = `${tokens} tokens in ${seconds.toFixed(2)} s`;
    parts.push(rate ? `${said}, ${rate.toFixed(1)} tokens/s, first after ${first.toFixed(2)} s` : said);
    if (contextTokens) {
      const meter = make("meter");
      meter.max = contextTokens;
      meter.high = contextTokens * 0.9;
      meter.value = prompt + tokens;
      meter.setAttribute("aria-label", "Context in use");
      parts.push(" ", meter, ` ${(prompt + tokens).toLocaleString("en")} of ${contextTokens.toLocaleString("en")} tokens`);
    }
  }
  if (note) parts.push(parts.length ? `; ${note}` : note);
  return parts;
}

function addButtons({ buttons }, message, index) {
  const isUser = message.role === "user";
  buttons.replaceChildren(small("Copy", "Copy the message", (button) => copy(message.content, button)));
  if (isUser) buttons.append(small("Edit", "Edit the message", () => edit(index)));
  else if (index === conversation.messages.length - 1) {
    buttons.append(small("Regenerate", "Answer again", () => {
      if (answering) return;
      conversation.messages.length = index;
      show();
      answer();
    }));
  }
}

/** Show the whole conversation anew. */
function show() {
  at("log").replaceChildren();
  conversation.messages.forEach(addTurn);
  if (!conversation.messages.length) at("log").append(make("p", "quiet empty", "Nothing has been said yet."));
}

/** Begin to edit the user's message number `index`; null ends it. */
function edit(index) {
  if (answering) return;
  edited = index;
  at("editing").hidden = index === null;
  at("message").value = index === null ? "" : conversation.messages[index].content;
  at("message").focus();
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

/** The fields of a request that the settings give. */
function sampling() {
  const fields = {
    max_tokens: "max-tokens", temperature: "temperature", top_p: "top-p", top_k: "top-k", min_p: "min-p",
    presence_penalty: "presence", frequency_penalty: "frequency", seed: "seed",
  };
  const given = Object.entries(fields).map(([name, id]) => [name, at(id).valueAsNumber]);
  return Object.fromEntries(given.filter(([, value]) => !Number.isNaN(value)));
}

/** Send the conversation and show the answer as it comes. Text that nobody answered goes back to where it was written. */
async function answer() {
  const log = at("log");
  const { messages } = conversation;
  const system = at("system").value.trim();
  const asked = messages.map(({ role, content }) => ({ role, content }));
  if (system) asked.unshift({ role: "system", content: system });
  const message = { role: "assistant", content: "", reasoning: "", facts: {} };
  const shown = addTurn(message, messages.length);
  const own = conversation;
  answering = new AbortController();
  setAnswering(true);
  showError("");
  const began = performance.now();
  let first = null;
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    showMessage(shown, message);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  let failure = "";
  try {
    const reply = await ask("v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: model || undefined,
        messages: asked,
        ...sampling(),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content || delta.content) first ??= performance.now();
      message.reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      if (event.usage) {
        const now = performance.now();
        const { completion_tokens: tokens, prompt_tokens: prompt } = event.usage;
        const rate = first !== null && tokens > 1 ? ((tokens - 1) * 1000) / Math.max(1, now - first) : 0;
        Object.assign(message.facts, { tokens, prompt, seconds: (now - began) / 1000, first: ((first ?? now) - began) / 1000, rate });
      }
      drawing ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    const wasStopped = error.name === "AbortError";
    message.facts.note = wasStopped ? "stopped" : error.message;
    failure = wasStopped ? "" : error.message;
    shown.facts.classList.toggle("failed", !wasStopped);
  }
  cancelAnimationFrame(drawing);
  if (message.content || message.reasoning) {
    messages.push(message);
    draw();
    addButtons(shown, message, messages.length - 1);
  } else {
    shown.turn.remove();
    const unanswered = messages.pop();
    log.lastElementChild?.remove();
    if (unanswered) at("message").value = [unanswered.content, at("message").value].filter(Boolean).join("\n");
    if (!messages.length) show();
    failure ||= message.facts.note ? "" : "the model said nothing";
  }
  showError(failure);
  if (messages.length) keep(own);
  setAnswering(false);
  answering = null;
  showKept();
}

function setAnswering(on) {
  at("log").setAttribute("aria-busy", String(on));
  for (const id of ["send", "new"]) at(id).disabled = on;
  at("stop").hidden = !on;
}

/** The list of conversations that this browser keeps. */
function showKept() {
  const kept = conversations();
  at("kept-count").textContent = kept.length;
  at("kept-list").replaceChildren(...kept.map((each) => {
    const open = small(each.title, "", () => {
      if (answering) return;
      conversation = each;
      edit(null);
      show();
      showKept();
    });
    if (each.id === conversation.id) open.setAttribute("aria-current", "true");
    const remove = small("Delete", `Delete ${each.title}`, () => {
      if (answering) return;
      forget(each.id);
      if (each.id === conversation.id) startAnew();
      showKept();
    });
    return make("li", "", "", open, remove);
  }));
}

function startAnew() {
  conversation = begin();
  edit(null);
  showError("");
  show();
  showKept();
}

/** Save the conversation as a file of JSON: the messages as a request has them, and what they took. */
function exportConversation() {
  const system = at("system").value.trim();
  const content = { model, system: system || null, sampling: sampling(), messages: conversation.messages };
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  link.download = `conversation-${conversation.id}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
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
      const [served] = (await (await ask("v1/models")).json()).data;
      [model, contextTokens] = [served.id, served.max_model_len];
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
  if (edited !== null) {
    conversation.messages.length = edited;
    show();
  }
  edit(null);
  const message = { role: "user", content: text };
  conversation.messages.push(message);
  show();
  answer();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && edited !== null) edit(null);
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("chat-form").requestSubmit();
});
at("stop").addEventListener("click", () => answering?.abort());
at("new").addEventListener("click", startAnew);
at("keep").addEventListener("click", () => edit(null));
at("export").addEventListener("click", exportConversation);
const fields = ["max-tokens", "temperature", "top-p", "top-k", "min-p", "presence", "frequency", "seed", "system"];
for (const [id, value] of Object.entries(settings())) if (fields.includes(id)) at(id).value = value;
at("chat-form").addEventListener("change", () => {
  keepSettings(Object.fromEntries(fields.map((id) => [id, at(id).value])));
});
showKept();
at("filter").addEventListener("input", filterTable);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  poll();
});
keepPolling();
