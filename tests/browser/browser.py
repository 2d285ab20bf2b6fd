"""Chromium without a window, over the DevTools protocol through a pipe: no driver, no port, no package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time


class Browser:
    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="whet-browser-")
        (its_end, self.commands), (self.answers, its_other_end) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4; bash puts the pipes there, whatever their numbers here.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (its_end, its_other_end))
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self.profile}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        self.process = subprocess.Popen(["bash", "-c", f'exec chromium "$@" 3<&{read} 4>&{write}', "bash", *options],
                                        pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (its_end, its_other_end, read, write):
            os.close(end)
        self.received, self.calls, self.events, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(timeout=30)
        shutil.rmtree(self.profile, ignore_errors=True)

    # ---- the protocol

    def _next(self):
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.answers], [], [], 60)
            assert ready, "the browser is silent"
            block = os.read(self.answers, 1 << 16)
            assert block, "the browser ended"
            self.received += block
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    # ---- what a person does

    def open(self, path, width=1000, height=900, scheme="light", media=""):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._load("about:blank")  # else the same address with another hash would not load again
        self._load(f"file://{path}")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def _load(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        end = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end
            self.events.append(self._next())

    def problems(self):
        """Messages, exceptions and requests since the page was opened, but for the page itself."""
        self.run("0")  # what came before it has arrived
        messages = [e for e in self.events if e.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]
        requests = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return messages + [url for url in requests[1:] if not url.startswith(("blob:", "data:"))]

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def misplaced_texts(self):
        """Figures with labels of an axis that touch, or texts that leave the figure."""
        return self.run("""[...document.querySelectorAll('figure')].flatMap((figure) => {
            const edge = figure.getBoundingClientRect();
            const over = [...figure.querySelectorAll('svg text')].filter((t) => {
                const b = t.getBoundingClientRect();
                return b.left < edge.left - 1 || b.right > edge.right + 1;
            });
            const touching = [...figure.querySelectorAll('.axis')].flatMap((axis) => {
                const boxes = [...axis.querySelectorAll('text')].map((t) => t.getBoundingClientRect());
                return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3));
            });
            return over.length + touching.length ? [figure.id] : [];
        })""")

    def focus(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode={"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[key])

    def hover(self, selector, x=0.5, y=0.5):
        """The pointer over an element, at these shares of its width and height."""
        box = self.run(f"""(() => {{
            const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center"}});
            const b = e.getBoundingClientRect();
            return [b.left, b.top, b.width, b.height];
        }})()""")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + x * box[2], y=box[1] + y * box[3])

    def screenshot(self, path):
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("document.documentElement.clientWidth")
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})["data"]
        path.write_bytes(base64.b64decode(data))
