"""Full blocks of rows, found by their tokens and all tokens before them, kept until their place is needed."""

import numpy as np

from pagedkv.sequence import Sequence


class Node:
    """A full block in the tree of prefixes: the path from the root spells the tokens before it."""

    __slots__ = ("block_id", "children", "n_users", "owner", "parent", "tokens")

    def __init__(self, parent, tokens, block_id, owner):
        self.parent, self.tokens, self.block_id = parent, tokens, block_id
        self.owner = owner  # the Sequence of this block alone by which the cache owns it, None at the root
        self.children = {}  # tokens of the next block -> Node
        self.n_users = 0  # running sequences whose rows follow this path


class PrefixCache:
    """Blocks of a pool that later sequences may start from.

    The key of a block is the tuple of its tokens, in the dict of the block before it: Python finds it by hash and
    compares the tokens, so equal hashes of unequal tokens cannot lie, and a path equals all tokens up to its end.

    The cache owns every block in it once. A path in use is never evicted; of the others the one left longest ago goes
    first, and as a path is left from its end, a block goes before those that it follows.

    Parameters
    ----------
    pool : BlockPool
    enabled : bool
        False: nothing is found and nothing kept.
    """

    def __init__(self, pool, enabled=True):
        self._pool, self._enabled = pool, enabled
        self._root = Node(None, (), -1, None)
        self._idle = {}  # Nodes without users, the longest left first
        self.n_queries = self.n_hits = self.n_evicted = 0  # tokens asked for, tokens found, blocks given back

    @property
    def n_idle(self):
        """Blocks that only the cache owns."""
        return len(self._idle)

    def find(self, tokens):
        """The longest path of full blocks that spells the beginning of `tokens`; a list of Nodes."""
        block_size, path, node = self._pool.block_size, [], self._root
        if self._enabled:
            for begin in range(0, len(tokens) - block_size + 1, block_size):
                node = node.children.get(_key(tokens, begin, begin + block_size))
                if node is None:
                    break
                path.append(node)
        return path

    def next_block(self, path, tokens):
        """What tells the full block of `tokens` after `path` from all others; None where there is no such block."""
        begin = len(path) * self._pool.block_size
        end = begin + self._pool.block_size
        return (path[-1] if path else self._root, _key(tokens, begin, end)) if self._enabled and end <= len(tokens) else None

    def hold(self, path):
        """Count a sequence as user of a path."""
        for node in path:
            node.n_users += 1
            self._idle.pop(node, None)

    def leave(self, path):
        """Take the user away again."""
        for node in reversed(path):
            node.n_users -= 1
            if node.n_users == 0:
                self._idle[node] = None

    def leave_all(self):
        """No path has users any more, whatever was counted."""
        for node in reversed(self._nodes()):
            node.n_users = 0
            self._idle.setdefault(node)

    def _nodes(self):
        nodes = list(self._root.children.values())
        for node in nodes:  # grows: parents before children
            nodes += node.children.values()
        return nodes

    def owned(self):
        """Whether the cache owns each block, bool ``[n_blocks]``."""
        owned = np.zeros(self._pool.n_blocks, bool)
        owned[[node.block_id for node in self._nodes()]] = True
        return owned

    def extend(self, path, tokens, seq):
        """Add the full blocks of `seq` past its path, whose rows it has computed, and use them.

        Parameters
        ----------
        path : list of Node
            What the sequence uses already; grows.
        tokens : list of int
            Of the sequence.
        seq : Sequence
        """
        block_size = self._pool.block_size
        n_full = len(seq) // block_size
        if not self._enabled or len(path) >= n_full:
            return
        table = seq.block_table
        for i in range(len(path), n_full):
            parent, key = path[-1] if path else self._root, _key(tokens, i * block_size, (i + 1) * block_size)
            node, block_id = parent.children.get(key), int(table[i])
            if node is None or node.block_id != block_id:
                # A count that nobody would take back, if an exception came before the next line, cannot be left here:
                # it goes with the object.
                owner = Sequence.from_blocks(self._pool, [block_id], block_size)
            if node is None:
                node = parent.children[key] = Node(parent, key, block_id, owner)
            elif node.block_id != block_id:
                # Computed twice, the same bits. Own the newer copy: the sequence that holds it runs, and at the worst
                # alone, when every block that it does not need itself must be free for it.
                node.block_id, node.owner = block_id, owner
            self.hold([node])
            path.append(node)

    def evict(self, n):
        """Give up to `n` blocks back to the pool, the longest left first; returns how many."""
        n = min(n, len(self._idle))
        for _ in range(n):
            node = next(iter(self._idle))
            del self._idle[node]
            del node.parent.children[node.tokens]
            node.owner.free()
        self.n_evicted += n
        return n


def _key(tokens, begin, end):
    return tuple(tokens[begin:end])
