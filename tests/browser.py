"""Drives Debian's Chromium without a window, by its DevTools protocol: a socket, frames of a WebSocket, JSON."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A browser with one page. All that the page asks for, and says in its console, is kept."""

    def __init__(self, *, width: int = 1280, height: int = 900, flags: tuple[str, ...] = ()) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", *flags, "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._number, self.events = 0, []
        self._socket = _connected(self._page_address())
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)
        self._profile.cleanup()

    def _page_address(self) -> str:
        port_file = Path(self._profile.name) / "DevToolsActivePort"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if port_file.exists() and (lines := port_file.read_text().split()):
                pages = json.load(urlopen(f"http://127.0.0.1:{lines[0]}/json", timeout=10))
                found = [page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"]
                if found:
                    return found[0]
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    # -- the protocol

    def call(self, method: str, **params: Any) -> Any:
        """One command, and its result. Events that come before it are kept."""
        self._number += 1
        self._send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def _send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        head = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        # A client's frames are masked.
        pad = (mask * (size // 4 + 1))[:size]
        body = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
        self._socket.sendall(head + mask + body)

    def _receive(self) -> str:
        parts = []
        while True:
            first, second = self._read(2)
            size = second & 127
            if size >= 126:
                size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
            data = self._read(size)
            # Pings need no answer here.
            if first & 15 in (0, 1):
                parts.append(data)
                if first & 128:
                    return b"".join(parts).decode()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            parts.append(self._socket.recv(min(count, 2**16)))
            assert parts[-1], "the browser has closed the connection"
            count -= len(parts[-1])
        return b"".join(parts)

    # -- the page

    def open(self, url: str) -> None:
        """Go to an address."""
        self.events.clear()
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.run(f"Boolean({script})"):
                    return
            except RuntimeError:
                # The page is being exchanged.
                pass
            time.sleep(0.02)
        raise TimeoutError(
            f"{script} did not become true; the page shows: {self.run('document.body.innerText')[:2000]}"
        )

    def press(self, key: str) -> None:
        """Press a key, as a person does: to whatever has the focus."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
        options = {"key": key, "text": text, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Another size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme: str) -> None:
        """What the system prefers: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: str | Path, quality: int | None = None) -> None:
        """What is in the window, as a PNG."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def requests(self) -> list[str]:
        """All addresses that the page has asked for."""
        self.run("1")
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        self.run("1")
        found = [
            e["params"]["exceptionDetails"]["text"] for e in self.events if e["method"] == "Runtime.exceptionThrown"
        ]
        logs = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        found += [entry["text"] for entry in logs if entry["level"] in ("error", "warning")]
        calls = [e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        return found + [str(call["args"]) for call in calls if call["type"] in ("error", "warning", "assert")]


def _connected(address: str) -> socket.socket:
    """A WebSocket, after its handshake."""
    host, _, path = address.removeprefix("ws://").partition("/")
    name, _, port = host.partition(":")
    made = socket.create_connection((name, int(port)), timeout=60)
    key = base64.b64encode(os.urandom(16)).decode()
    made.sendall(
        f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += made.recv(1)
    assert b" 101 " in answer.split(b"\r\n")[0], answer
    return made
