"""The beginning of programs that have no network."""


def network_raises(error: str) -> str:
    """Statements after which whatever asks for the network meets this built-in exception."""
    return f"""
import socket

def refuse(*args, **kwargs):
    raise {error}("the network was called")

socket.socket.connect = refuse
socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
"""
