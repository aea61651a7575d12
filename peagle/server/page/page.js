// The chat of the page. Whatever a model says reaches the document as text nodes, never as markup.
import { sendChat } from "./stream.js";
import { Answer, Tip } from "./tokens.js";

const at = (id) => document.getElementById(id);
const figure = (value, digits) => (value === null ? "–" : value.toFixed(digits));
const tip = new Tip(at("about"));

let messages = []; // the conversation, as the API takes it
let last = null; // what can be measured again: {body, answer}
let running = null; // the AbortController of the answer under way
let numSaid = 0;

function say(text, isError = false) {
  numSaid += 1;
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

function add(tag, parent, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  parent.append(element);
  return element;
}

/** A turn of the conversation; the element that holds its text. */
function addTurn(role, heading, text = "") {
  at("welcome").hidden = true;
  const turn = add("section", at("talk"), "", `turn ${role}`);
  add("h2", turn, heading);
  const content = add("p", turn, text);
  at("talk").scrollTop = at("talk").scrollHeight;
  return content;
}

function settings() {
  const seed = at("seed").value;
  return {
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("max-tokens").value),
    // Always one, so that an answer can be had again without drafts.
    seed: seed === "" ? Math.floor(Math.random() * 2 ** 52) : Number(seed),
  };
}

function setBusy(controller) {
  running = controller;
  at("send").disabled = Boolean(controller);
  at("stop").disabled = !controller;
  at("measure").disabled = Boolean(controller) || last === null;
  at("reset").disabled = Boolean(controller);
  at("talk").setAttribute("aria-busy", String(Boolean(controller)));
}

/** Stream one answer into the conversation; true when it came to its end. Errors are shown, what came before stays. */
async function receive(body, heading, onChange) {
  const content = addTurn("assistant", heading);
  const answer = new Answer(content, tip);
  const controller = new AbortController();
  setBusy(controller);
  say("answering");
  let problem = null;
  try {
    for await (const chunk of sendChat(body, at("key").value, controller.signal)) {
      const talk = at("talk");
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
      answer.take(chunk);
      onChange(answer);
      if (follows) talk.scrollTop = talk.scrollHeight;
    }
  } catch (error) {
    problem = controller.signal.aborted ? "stopped" : error.message;
    if (error.status === 401) at("settings").open = true;
  } finally {
    setBusy(null);
  }
  if (!problem && !answer.reason) problem = "the stream ended before the answer did";
  add("p", content.parentElement, answer.summary(), "figures");
  if (problem) add("p", content.parentElement, problem, problem === "stopped" ? "figures" : "figures error");
  say(problem ?? `done: ${answer.summary()}`, Boolean(problem) && problem !== "stopped");
  at("talk").scrollTop = at("talk").scrollHeight;
  return { answer, complete: !problem };
}

function showFigures(answer) {
  at("length").textContent = figure(answer.acceptanceLength, 2);
  at("speed").textContent = figure(answer.speed, 1);
  at("plain").textContent = at("ratio").textContent = "–";
}

async function send() {
  const text = at("message").value.trim();
  if (text === "" || running || !at("composer").reportValidity()) return;
  at("message").value = "";
  addTurn("user", "You", text);
  const asked = [...messages, { role: "user", content: text }];
  const body = { messages: asked, ...settings(), stream: true };
  last = null;
  const { answer, complete } = await receive({ ...body, peagle: { trace: true } }, "Answer", showFigures);
  if (answer.count > 0) {
    messages = [...asked, { role: "assistant", content: answer.text }];
    last = complete ? { body, answer } : null;
  }
  setBusy(null);
}

/** The last answer once more without drafts: the figure that the speed-up is measured against. */
async function measure() {
  if (last === null || running) return;
  const body = { ...last.body, peagle: { trace: true, drafts: false } };
  const show = (answer) => { at("plain").textContent = figure(answer.speed, 1); };
  const { answer, complete } = await receive(body, "The same without drafts", show);
  if (!complete) return;
  if (answer.numDrafted > 0) {
    at("plain").textContent = "–";
    say("not measured: other requests were running, and the server drafted for all of them; try again", true);
    return;
  }
  const same = answer.ids.join() === last.answer.ids.join() ? "the same tokens" : "not the same tokens";
  const ratio = answer.speed && last.answer.speed ? last.answer.speed / answer.speed : null;
  at("ratio").textContent = ratio === null ? "–" : `× ${ratio.toFixed(2)}`;
  say(`measured: ${same} as with drafts, ${figure(answer.speed, 1)} tokens/s without`);
}

/** Say which model is here, or that it wants a key, unless there has been other news by then. */
async function greet() {
  const before = numSaid;
  const sayIfQuiet = (text, isError) => { if (numSaid === before) say(text, isError); };
  const key = at("key").value;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const response = await fetch("v1/models", { headers });
    if (response.status === 401) {
      at("settings").open = true;
      sayIfQuiet("this server wants an API key: enter it in the settings");
    } else if (response.ok) {
      const model = (await response.json()).data[0];
      at("model").textContent = `${model.id}, context ${model.max_model_len} tokens`;
      sayIfQuiet("");
    }
  } catch {
    sayIfQuiet("the server does not answer", true);
  }
}

document.addEventListener("pointerdown", () => tip.hide());
at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { tip.hide(); running?.abort(); }
});
at("stop").addEventListener("click", () => running?.abort());
at("measure").addEventListener("click", measure);
at("key").addEventListener("change", greet);
at("colours").addEventListener("change", () => document.body.classList.toggle("no-colours", !at("colours").checked));
at("reset").addEventListener("click", () => {
  messages = [];
  last = null;
  at("talk").querySelectorAll(".turn").forEach((turn) => turn.remove());
  at("welcome").hidden = false;
  for (const id of ["length", "speed", "plain", "ratio"]) at(id).textContent = "–";
  setBusy(null);
  say("");
});
greet();
