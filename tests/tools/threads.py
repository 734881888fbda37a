"""Threads in place of processes, for functions that gather objects."""

import threading
from typing import Any


class Group:
    """Threads in place of the processes of several machines."""

    def __init__(self, count: int) -> None:
        self.answers: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)
        self.own = threading.local()

    def gather(self, objects: list[Any]) -> list[Any]:
        self.answers[self.own.rank] = objects
        self.barrier.wait()
        gathered = [each for of_process in self.answers for each in of_process]
        self.barrier.wait()
        return gathered

    def run(self, body: Any) -> list[Any]:
        results: list[Any] = [None] * len(self.answers)

        def work(rank: int) -> None:
            self.own.rank = rank
            results[rank] = body(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
