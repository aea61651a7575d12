// Server-sent events of a chat completion, one parsed chunk after the other.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function explain(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not from the API: a proxy's page, perhaps */ }
  const wait = response.headers.get("Retry-After");
  return new ApiError(wait ? `${message} (try again in ${wait} s)` : message, response.status);
}

/** Yields the chunks up to [DONE]; throws ApiError for a refusal or an error within the stream. */
export async function* sendChat(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await explain(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status);
      yield chunk;
    }
  }
}
