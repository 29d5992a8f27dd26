"""Attacks by bodies and connections, for hostile.py: a server is sent megabytes of nonsense, or
more connections than it takes, while others read their streams.

python benchmarks/hostile_bodies.py [ATTACK ...] [--seconds 15] [--clients 8] [--model NAME]
"""

import contextlib
import http.client
import socket
import time
from urllib.parse import urlsplit

import hostile

SIZE = 4 * 1024 * 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = '{"role":"user","content":"a"}'
IDLE, HELD = 200, 4.0  # connections of each attacker, and seconds that they are kept


def send(url, body, path=CHAT, kind="application/json"):
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    try:
        sent = body.encode() if isinstance(body, str) else body
        connection.request("POST", path, sent, {"Content-Type": kind})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def chat(messages=USER, more=""):
    return f'{{"model":"{hostile.MODEL}","max_tokens":1,"messages":[{messages}]{more}}}'


def text(prompt):
    return f'{{"model":"{hostile.MODEL}","max_tokens":1,"prompt":{prompt}}}'


def filled(one, size=SIZE - 200):
    """A list's entries, this one again and again."""
    return ",".join([one] * (size // (len(one) + 1)))


def wrong_messages(url):
    return send(url, chat(filled("1")))


def many_messages(url):
    return send(url, chat(filled(USER)))


def many_parts(url):
    parts = filled('{"type":"text","text":"a"}')
    return send(url, chat(f'{{"role":"user","content":[{parts}]}}'))


def many_tools(url):
    tool = '{"type":"function","function":{"name":"f","parameters":{}}}'
    return send(url, chat(more=f',"tools":[{filled(tool)}]'))


def long_tools(url):
    """128 of them, which together are a megabyte of text."""
    tools = ",".join(
        f'{{"type":"function","function":{{"name":"f{n}","description":"{"word " * 1600}"}}}}'
        for n in range(128)
    )
    return send(url, chat(more=f',"tools":[{tools}]'))


def long_text(url):
    return send(url, chat(f'{{"role":"user","content":"{"hello " * (SIZE // 6 - 100)}"}}'))


def token_ids(url):
    return send(url, text(f"[{filled('5')}]"), TEXT)


def lists_of_ids(url):
    return send(url, text(f"[{filled('[5]')}]"), TEXT)


def many_stops(url):
    return send(url, chat(more=f',"stop":[{filled(chr(34) + "a" + chr(34))}]'))


def many_biases(url):
    biases = ",".join(f'"{n}":1' for n in range(SIZE // 12))
    return send(url, chat(more=f',"logit_bias":{{{biases}}}'))


def many_fields(url):
    return send(url, chat(more="".join(f',"x{n}":1' for n in range(SIZE // 12))))


def twice_the_same(url):
    return send(url, chat(more=filled(',"n":1').replace(",,", ",")[:-1] + "1"))


def nested(url):
    return send(url, chat(more=',"response_format":' + '{"a":' * (SIZE // 6)))


def digits(url):
    return send(url, chat(more=',"seed":' + "1" * (SIZE - 200)))


def numbers(url):
    return send(url, chat(more=f',"chat_template_kwargs":{{"a":[{filled("1.25e-7")}]}}'))


def no_text(url):
    return send(url, b'{"model":"' + b"\xff" * (SIZE - 200) + b'"}')


def long_name(url):
    return send(url, f'{{"model":"{"m" * (SIZE - 200)}","messages":[{USER}]}}')


def other_kind(url):
    return send(url, chat(filled("1")), kind="text/plain")


def one_byte_chunks(url):
    place = urlsplit(url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {place.netloc}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        contextlib.suppress(OSError),
        socket.create_connection((place.hostname, place.port)) as one,
    ):
        one.settimeout(20)
        one.sendall(head.encode() + b"1\r\na\r\n" * (SIZE // 4))
        one.sendall(b"0\r\n\r\n")
        return int(one.recv(100).split()[1])


def half_bodies(url):
    """Most of a body, and then nothing for a while."""
    place = urlsplit(url)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {SIZE}\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            with contextlib.suppress(OSError):
                one = stack.enter_context(socket.create_connection((place.hostname, place.port)))
                one.settimeout(5)
                one.sendall(head.encode() + b"1" * (SIZE - 100))
        time.sleep(HELD)


def idle_connections(url):
    place = urlsplit(url)
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((place.hostname, place.port)))
        time.sleep(HELD)
    return 0


ATTACKS = {
    one.__name__.replace("_", "-"): one
    for one in (
        wrong_messages, many_messages, many_parts, many_tools, long_tools, long_text, token_ids,
        lists_of_ids, many_stops, many_biases, many_fields, twice_the_same, nested, digits, numbers,
        no_text, long_name, other_kind, one_byte_chunks, half_bodies, idle_connections,
    )
}  # fmt: skip

if __name__ == "__main__":
    hostile.ATTACKS = ATTACKS
    hostile.main()
