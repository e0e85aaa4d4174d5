/* A live page: the server sends the parts of the document that changed. */
function follow() {
  const source = new EventSource("events");
  const say = (text, kind) => {
    const badge = $("link");
    if (badge) {
      badge.textContent = text;
      badge.className = kind;
    }
  };
  let state = ["connecting", "plain"];
  source.addEventListener("open", () => {
    state = ["live", "good"];
    say(...state);
  });
  source.addEventListener("error", () => {
    state = source.readyState === EventSource.CLOSED ? ["the server ended", "bad"] : ["reconnecting", "bad"];
    say(...state);
  });
  source.addEventListener("parts", (event) => {
    const parts = JSON.parse(event.data);
    Object.assign(doc, parts);
    redraw(
      new Set(
        Object.keys(parts)
          .map((k) => DRAWN_BY[k] || k)
          .filter((k) => draw[k]),
      ),
    );
    say(...state);
    document.documentElement.dataset.received = String(
      1 + Number(document.documentElement.dataset.received || 0),
    );
  });
  source.addEventListener("end", () => {
    source.close();
    state = ["run finished", "good"];
    say(...state);
  });
}
