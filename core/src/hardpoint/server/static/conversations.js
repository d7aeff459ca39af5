/** Conversations and settings that this browser keeps. They never leave it, but for what is sent to be answered. */

const CONVERSATIONS = "hardpoint-conversations";
const SETTINGS = "hardpoint-settings";
const MOST = 100;
const TITLE = 60;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch { // somebody else's text, or a browser that keeps nothing
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch { // full, or not allowed
    return false;
  }
}

/** All conversations, the newest first: `{id, title, changed, messages}`. */
export function conversations() {
  const kept = read(CONVERSATIONS, []);
  return Array.isArray(kept) ? kept.filter((each) => each && Array.isArray(each.messages)) : [];
}

/** Keep `conversation` in place of what has its id. The oldest go where there is no room for all. */
export function keep(conversation) {
  const others = conversations().filter((each) => each.id !== conversation.id);
  const said = conversation.messages.find((each) => each.role === "user")?.content ?? "";
  const title = said.trim().split("\n")[0].slice(0, TITLE) || "Conversation";
  let all = [{ ...conversation, title, changed: Date.now() }, ...others].slice(0, MOST);
  while (!write(CONVERSATIONS, all) && all.length > 1) all = all.slice(0, -1);
}

/** Forget a conversation. */
export function forget(id) {
  write(CONVERSATIONS, conversations().filter((each) => each.id !== id));
}

/** A new conversation, which is kept once something is said. */
export function begin() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, messages: [] };
}

/** The settings that were kept, by the ids of their fields. */
export function settings() {
  const kept = read(SETTINGS, {});
  return kept && typeof kept === "object" ? kept : {};
}

/** Keep the settings. */
export function keepSettings(values) {
  write(SETTINGS, values);
}
