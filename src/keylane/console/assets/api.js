// Questions to the server, and the stream of its news.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function answer(response) {
  let found;
  try {
    found = await response.json();
  } catch {
    throw new ApiError(response.status, `the console answered ${response.status}, and not in JSON`);
  }
  if (!response.ok) throw new ApiError(response.status, found.error || `status ${response.status}`);
  return found;
}

export async function get(path, query = {}, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return answer(await fetch(text ? `${path}?${text}` : path, { headers: { accept: "application/json" }, signal }));
}

export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

// Follows the server; `hear(name, data)` gets each event. EventSource connects again by itself.
export class Stream {
  constructor(hear, state) {
    this.hear = hear;
    this.state = state;
    this.last = 0;
    this.query = null;
  }

  follow(query) {
    const text = new URLSearchParams(query).toString();
    if (text === this.query && this.source && this.source.readyState !== EventSource.CLOSED) return;
    this.close();
    this.query = text;
    this.source = new EventSource(`/api/stream?${text}`);
    for (const name of ["overview", "app"]) {
      this.source.addEventListener(name, (event) => {
        this.last = Date.now();
        this.hear(name, JSON.parse(event.data));
      });
    }
    this.source.addEventListener("beat", () => { this.last = Date.now(); });
    this.source.onopen = () => this.state("open");
    this.source.onerror = () => {
      this.state("lost");
      if (this.source.readyState === EventSource.CLOSED) {
        setTimeout(() => { const again = this.query; this.query = null; if (again !== null) this.follow(new URLSearchParams(again)); }, 2000);
      }
    };
  }

  close() {
    if (this.source) this.source.close();
    this.source = null;
    this.query = null;
  }
}
