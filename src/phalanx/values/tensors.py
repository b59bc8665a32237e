"""What a context offers for tensors: the same in workers and in the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from phalanx.tensors.store.client import TensorClient
    from phalanx.tensors.store.layout import Tree
    from phalanx.values.spec import Duration

_PATIENCE_S = 300.0
"""How long tensors are waited for unless told otherwise."""


class SharedTensors:
    """Tensors by key, shared by all ranks and the launcher.

    Usable from any thread, and in a worker also from processes that it forks (DataLoader
    workers).
    """

    def put_tensor(
        self, key: str, tensor: torch.Tensor, *, timeout: Duration | None = _PATIENCE_S
    ) -> None:
        """Share a tensor with all ranks and the launcher, under a key. Blocks for one copy.

        Later readers get it in place of what was there; a reader keeps what it got. It is
        kept by the agent, so it outlives this worker and restarts of the group, and ends with
        the launcher's context.

        Args:
            key: Its name, 1 to 1,024 bytes.
            tensor: Any dtype, shape and device. It arrives dense and without gradient.
            timeout: Seconds (or timedelta; None: no limit) to wait while another process is
                in `update_tensor` with the key.

        Raises:
            TensorError: The key is no key, or the tensor is sparse, quantised, nested or meta.
            StoreFullError: It does not fit (`store_limit` of `start_processes`).
            StoreTimeoutError: The key was not let go in time.
            StoreClosedError: The context was closed, or the agent has ended.
        """
        self._tensors.put(key, tensor, timeout)

    def get_tensor(
        self,
        key: str,
        timeout: Duration | None = _PATIENCE_S,
        *,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return the tensor that was put last under a key. Blocks until there is one.

        Nothing is copied, whatever its size: it is mapped, and private. You may write into
        it, and nobody else sees that.

        Args:
            key: Its name.
            timeout: Seconds (or timedelta; None: no limit) to wait for it; 0: not at all.
            device: Where it shall be; None: on the CPU.

        Raises:
            StoreTimeoutError: Nobody has put it; names keys like it, and who is alive.
            StoreClosedError: The context was closed, or the agent has ended.
        """
        return self._tensors.get(key, timeout, device)

    def update_tensor(
        self,
        key: str,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        timeout: Duration | None = _PATIENCE_S,
    ) -> torch.Tensor:
        """Replace a tensor by what `function` makes of it, with nobody in between.

        Updates of one key follow each other; other writers wait, readers see the old value.
        If the function raises, or this process dies in it, the old value stays and the key is
        free.

        Args:
            key: Its name. Blocks until it is there.
            function: Gets the tensor, which it may change, and returns the new one. Updates
                of several keys inside each other must take them in the same order everywhere.
            timeout: Seconds (or timedelta; None: no limit) to wait for the key.

        Returns:
            The new tensor.

        Raises:
            TensorError: The function returned no tensor.
            StoreTimeoutError: The key did not come, or was not let go, in time.
        """
        return self._tensors.update(key, function, timeout)

    def add_tensor(
        self, key: str, tensor: torch.Tensor, *, timeout: Duration | None = _PATIENCE_S
    ) -> torch.Tensor:
        """Add to a shared tensor, with nobody in between; where there is none, put it.

        Args:
            key: Its name.
            tensor: Of the same shape, and of a dtype that fits into the one that is there.
            timeout: Seconds (or timedelta; None: no limit) to wait for the key.

        Returns:
            The sum.

        Raises:
            TensorError: Shape or dtype don't fit.
            StoreTimeoutError: The key was not let go in time.
        """
        return self._tensors.add(key, tensor, timeout)

    def delete_tensor(self, key: str, *, timeout: Duration | None = _PATIENCE_S) -> bool:
        """Delete what was put, or committed, under a key; return whether there was anything.

        Readers keep what they got. Memory goes back to the system, except for a part that is
        kept for what is put next.
        """
        return self._tensors.delete(key, timeout)

    def has_tensor(self, key: str) -> bool:
        """Return whether something is there under a key. Does not wait for it."""
        return self._tensors.has(key)

    def keys(self) -> list[str]:
        """Return the names of all tensors and trees that are there, sorted."""
        return self._tensors.keys()

    def put_tensors(self, key: str, tree: Tree, *, timeout: Duration | None = _PATIENCE_S) -> None:
        """Share a nested structure, as a ``state_dict()``, under one key.

        A reader gets all of one version. Otherwise as `put_tensor`.

        Args:
            key: Its name.
            tree: Tensors, numbers, strings, bytes and None in lists, tuples and dicts (keys:
                strings or integers), nested as you like. Subclasses arrive as plain ones.
            timeout: See `put_tensor`.
        """
        self._tensors.put_tree(key, tree, timeout)

    def get_tensors(self, key: str, timeout: Duration | None = _PATIENCE_S) -> Tree:
        """Return the structure (or the tensor) that was put last under a key.

        Its tensors are mapped, not copied, and private. Otherwise as `get_tensor`.
        """
        return self._tensors.get_tree(key, timeout)

    def commit_tensors(self, key: str, tree: Tree, *, version: int) -> None:
        """Store this rank's part of a version, to resume from. In workers only.

        A version is whole once every rank has committed its part of it. The newest whole one
        is kept, with all newer ones; what a fallen generation did not make whole is dropped.

        Args:
            key: Its name.
            tree: As in `put_tensors`; ranks may commit different things.
            version: A number that rises, as the step.

        Raises:
            StoreError: A version as new, or newer, is whole already.
        """
        self._tensors.commit(key, tree, version, self._own_rank)

    def get_committed_tensors(
        self, key: str, *, rank: int | None = None
    ) -> tuple[int, Tree] | None:
        """Return the newest version that all ranks have committed, and a rank's part of it.

        None if there is none. Does not wait.

        Args:
            key: Its name.
            rank: Whose part; None: this rank's own (in the launcher: rank 0's).
        """
        return self._tensors.get_committed(key, self._rank_to_read if rank is None else rank)

    # ── filled in by each side ───────────────────────────────────────────────────────────

    @property
    def _tensors(self) -> TensorClient:
        raise NotImplementedError

    @property
    def _own_rank(self) -> int:
        """This worker's rank; in the launcher an error."""
        raise NotImplementedError

    @property
    def _rank_to_read(self) -> int:
        """Whose part is read unless said otherwise."""
        raise NotImplementedError
