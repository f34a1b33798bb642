"""Threads that run jobs in order."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Threads:
    """Named threads, each of which starts with its first job. What a job raises is reported."""

    def __init__(self, report: Callable[[BaseException], None]):
        self._report = report
        self._queues: dict[str, queue.SimpleQueue[Job | None]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def do(self, name: str, job: Job) -> None:
        """Thread `name` runs `job` after those that it was given before."""
        with self._lock:
            if self._stopped:
                return
            if name not in self._queues:
                self._queues[name] = queue.SimpleQueue()
                work = threading.Thread(
                    target=self._run, args=(self._queues[name],), name=name, daemon=True
                )
                work.start()
            self._queues[name].put(job)

    def stop(self) -> None:
        """Ends the threads after the jobs that they have; new ones are dropped."""
        with self._lock:
            self._stopped = True
            for jobs in self._queues.values():
                jobs.put(None)

    def _run(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # the loop's thread raises it
                self._report(error)
