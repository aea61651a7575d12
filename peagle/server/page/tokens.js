// An answer as coloured tokens: what each was, and what the rounds brought.

const KINDS = {
  accepted: (token) => `draft ${token.position} of its round, accepted`,
  corrected: (token) => {
    const [first, ...later] = token.rejected.map((draft) => JSON.stringify(draft.text));
    const dropped = later.length ? `\nDropped with it: ${later.join(" ")}` : "";
    return `the target's own. Draft ${token.position} was ${first}: rejected${dropped}`;
  },
  bonus: () => "the target's own, after all drafts of the round were accepted",
  plain: () => "the target's own, nothing was drafted for it",
};

/** The small box that says what a token is. */
export class Tip {
  constructor(box) {
    this.box = box;
  }

  show(element, text) {
    this.box.textContent = text;
    this.box.hidden = false;
    const place = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const size = this.box.getBoundingClientRect();
    const above = place.top - size.height - 6;
    this.box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
    this.box.style.top = `${above > 4 ? above : place.bottom + 6}px`;
    element.setAttribute("aria-describedby", this.box.id);
  }

  hide() {
    this.box.hidden = true;
  }
}

export class Answer {
  constructor(content, tip) {
    this.content = content;
    this.tip = tip;
    this.text = "";
    this.ids = [];
    this.reason = null;
    this.final = null; // the server's own figures, in the last chunk
    this.numAccepted = this.numRounds = 0;
    this.tokens = new Map(); // element -> token
    this.watch();
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.text += choice.delta.content ?? "";
    const tokens = chunk.peagle?.tokens ?? [];
    if (tokens.length) this.time(tokens.length);
    for (const token of tokens) this.append(token);
    if (choice.finish_reason) {
      this.reason = choice.finish_reason;
      this.final = chunk.peagle;
    }
  }

  /** Speed counts from the first token on: the prompt's time is another matter. */
  time(count) {
    const now = performance.now();
    if (this.began === undefined) {
      this.began = now;
      this.atBegin = count;
    }
    this.latest = now;
  }

  append(token) {
    this.ids.push(token.id);
    if (token.kind === "accepted") this.numAccepted += 1;
    if (token.kind === "corrected" || token.kind === "bonus") this.numRounds += 1;
    if (token.text === "") return; // half a character, a header, or the end of the answer
    const element = document.createElement("span");
    element.className = `token ${token.kind}${token.thought ? " thought" : ""}`;
    element.textContent = token.text;
    element.tabIndex = this.tokens.size ? -1 : 0; // one stop for Tab, the arrow keys do the rest
    this.tokens.set(element, token);
    this.content.append(element);
  }

  get count() {
    return this.ids.length;
  }

  get numDrafted() {
    return this.final?.draft_tokens ?? 0;
  }

  get speed() {
    const seconds = (this.latest - this.began) / 1000;
    return seconds > 0 ? (this.count - this.atBegin) / seconds : null;
  }

  get acceptanceLength() {
    const rounds = this.final?.rounds ?? this.numRounds;
    return rounds ? 1 + (this.final?.accepted_tokens ?? this.numAccepted) / rounds : null;
  }

  summary() {
    const parts = [`${this.count} tokens`];
    if (this.speed !== null) parts.push(`${this.speed.toFixed(1)} tokens/s`);
    if (this.acceptanceLength === null) parts.push("no drafts");
    else parts.push(`acceptance length ${this.acceptanceLength.toFixed(2)}`);
    if (this.final?.rounds) {
      const shares = this.final.accepted_per_position.map((kept) => `${Math.round((100 * kept) / this.final.rounds)} %`);
      parts.push(`kept by position: ${shares.join(", ")}`);
    }
    if (this.reason && this.reason !== "stop") parts.push(`ended by ${this.reason}`);
    return parts.join(" · ");
  }

  watch() {
    const show = (event) => {
      const token = this.tokens.get(event.target);
      if (token) this.tip.show(event.target, `Token ${token.id} ${JSON.stringify(token.text)}: ${KINDS[token.kind](token)}.`);
    };
    for (const name of ["pointerover", "focusin", "click"]) this.content.addEventListener(name, show);
    for (const name of ["pointerout", "focusout"]) this.content.addEventListener(name, () => this.tip.hide());
    this.content.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !this.tokens.has(event.target)) return;
      const next = step > 0 ? event.target.nextElementSibling : event.target.previousElementSibling;
      if (!next) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }
}
