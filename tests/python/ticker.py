"""A thread that shows whether other threads get to run."""

import threading


class Ticker:
    """A Python thread that counts how often it gets to run."""

    def __enter__(self):
        self.ticks = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self):
        while not self.stop.wait(0.002):
            self.ticks += 1

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
