"""What every request passes before the routes: the key, the size of its body, and a net for what nobody caught."""

import hmac
import sys
import traceback

from pagedkv.server.api import ApiError

MOST_BODY_NBYTES = 8 << 20  # a million token ids; prompts that a context holds are far smaller
OPEN_PATHS = {"/health", "/"}  # asked by who has no key; the page asks its user for one


class Door:
    """ASGI middleware.

    Parameters
    ----------
    app : ASGI application
    respond : function of ApiError -> ASGI application
        Words a refusal.
    api_key : str or None
        That clients send as ``Authorization: Bearer KEY``.
    """

    def __init__(self, app, respond, api_key=None):
        self._app, self._respond = app, respond
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, n_read = False, 0

        async def counted_receive():
            nonlocal n_read
            message = await receive()
            n_read += len(message.get("body", b""))
            if n_read > MOST_BODY_NBYTES:
                raise _too_large(f"more than {MOST_BODY_NBYTES:,}")
            return message

        async def noted_send(message):
            nonlocal began
            began = True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, counted_receive, noted_send)
        except ApiError as error:
            await self._respond(error)(scope, receive, send)
        except Exception as error:  # the response was sent, or is sent now; uvicorn would log its words
            log(error)
            if not began:
                await self._respond(ApiError.of(RuntimeError()))(scope, receive, send)

    def _check(self, scope):
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise ApiError(401, "the API key is missing or wrong; it goes into the header Authorization: Bearer KEY",
                               code="invalid_api_key", www_authenticate="Bearer", connection="close")  # fmt: skip
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > MOST_BODY_NBYTES:
            raise _too_large(f"{int(length[:20]):,}")


def _too_large(n_nbytes):
    # Closed, as what the client still sends would be taken for its next request, or read for nothing.
    return ApiError(413, f"the body has {n_nbytes} bytes, {MOST_BODY_NBYTES:,} are the most", code="body_too_large",
                    connection="close")  # fmt: skip


def log(error):
    """Write where an error came from, and not its words, which may be those of a request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    print(f"pagedkv: error in a request: {type(error).__name__}\n{where}", end="", file=sys.stderr, flush=True)
