// Search runs in a worker, which browsers refuse to a page that was opened as a file. There, a script in
// a frame takes its place. (Zensical would have its shim of this name fetched from elsewhere.)
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    this.hear = (event) => {
      if (event.source !== inside) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    };
    addEventListener("message", this.hear);
    inside.document.open();
    inside.document.write(
      `<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = async (...urls) => {
          for (const url of urls)
            await new Promise((resolve) => {
              const script = document.createElement("script");
              script.src = url;
              script.onload = resolve;
              document.body.append(script);
            });
        };
      <\/script><body><script src="${url}"><\/script></body>`,
    );
    inside.document.close();
    this.ready = new Promise((resolve) => (inside.onload = resolve));
  }

  async postMessage(data) {
    await this.ready;
    const { contentWindow } = this.frame;
    // A copy, as a worker would have: it may change what it gets.
    const message = { data: structuredClone(data) };
    contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", message));
  }

  terminate() {
    removeEventListener("message", this.hear);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
