"""How rewards are called: here, in threads, in worker processes, on an event loop, over HTTP."""
