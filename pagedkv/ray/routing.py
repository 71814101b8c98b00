"""Which replica gets a request: the one whose cache holds what its prompt begins with, unless it has much to do."""

import json
from collections import OrderedDict
from hashlib import blake2b

from ray.serve.request_router import RequestRouter

FIRST_NBYTES, LAST_NBYTES = 64, 1 << 20  # of the prefixes that are compared: a block of English, and any context
MOST_PREFIXES = 100_000  # that are remembered, some 100 bytes each
SLACK = 8  # requests more than the least busy replica has: a step of 8 rows takes about as long as one of a single row


def prefix_keys(body):
    """Digests of a prompt's first 64, 128, 256, ... bytes, the shortest first.

    Parameters
    ----------
    body : bytes
        Of a completion or a chat. Of several prompts the first one counts.

    Returns
    -------
    list of bytes
        Empty where there is no prompt; what is wrong with the body is the replica's to say.

    Examples
    --------
    >>> a, b = (prefix_keys(b'{"prompt": "%s"}' % (b"once upon a time " * 20 + end)) for end in (b"a cat", b"a dog"))
    >>> len(a), a == b
    (3, True)
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    prompt = asked.get("messages", asked.get("prompt")) if isinstance(asked, dict) else None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        return []
    text = (prompt if isinstance(prompt, str) else json.dumps(prompt)).encode("utf-8", "surrogatepass")
    state, keys, begin, end = blake2b(digest_size=16), [], 0, FIRST_NBYTES
    while end <= min(len(text), LAST_NBYTES) or not keys:
        state.update(text[begin:end])
        keys.append(state.digest())
        begin, end = end, 2 * end
    return keys


class PrefixRouter(RequestRouter):
    """Requests that begin alike go to one replica, where the rows of what they share are computed once.

    That is the replica that had the longest prefix last; for one that is new, rendezvous hashing names a replica, the
    same one in every process that routes. Where it has more than `SLACK` requests more than the least busy one, that
    one gets the request, and the prefix from then on. The keys are the first argument of the call.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._homes = OrderedDict()  # key -> id of the replica that had it last

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        """Ranks of replicas, each a list; Serve takes the least busy one of the first rank that is not full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait a little between rounds in which all are full
        home = self._home(pending_request.args[0], candidate_replicas)
        if home is None or self._load(home) > min(map(self._load, candidate_replicas)) + SLACK:
            return [candidate_replicas]
        return [[home], [replica for replica in candidate_replicas if replica is not home]]

    def _home(self, keys, replicas):
        by_id = {replica.replica_id: replica for replica in replicas}
        for key in reversed(keys):
            if (replica := by_id.get(self._homes.get(key))) is not None:
                return replica
        if not keys:
            return None
        return max(replicas, key=lambda each: blake2b(keys[0] + each.replica_id.unique_id.encode()).digest(),
                   default=None)  # fmt: skip

    def _load(self, replica):
        return self.replica_queue_len_cache.get(replica.replica_id) or 0  # None: it was not heard of for seconds

    def on_request_routed(self, pending_request, replica_id, result):
        for key in pending_request.args[0]:
            self._homes[key] = replica_id
            self._homes.move_to_end(key)
        while len(self._homes) > MOST_PREFIXES:
            self._homes.popitem(last=False)
