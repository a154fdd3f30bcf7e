"""The kinds of NAT, as nft rules of a router whose `lan0` is the home and whose `wan0` is the internet."""

from __future__ import annotations

NATS: dict[str, str] = {
    "none": "a public address; everything passes",
    "full": "full cone: one public port per socket, open to everyone",
    "port": "port-restricted cone: one public port per socket, open to address and port that it has sent to",
    "symmetric": "another public port for every destination, open to that one only",
    "udp-blocked": "as port, but UDP passes in neither direction",
}
# A home router forgets nobody's port range; these are where a port-preserving NAT puts its mappings after a rebind.
_FIRST_REBOUND_PORT, _REBOUND_PORTS, _REBINDS = 20_000, 1_000, 40


def rules(nat: str, home: str, rebinds: int = 0) -> str:
    """Write the rule set of a router: its NAT kind, the home's address, and how often its mappings have changed."""
    mapping = "masquerade"
    if nat == "symmetric":
        mapping = "masquerade fully-random"
    elif rebinds:
        first = _FIRST_REBOUND_PORT + _REBOUND_PORTS * ((rebinds - 1) % _REBINDS)
        ports = f":{first}-{first + _REBOUND_PORTS - 1}"
        mapping = f"meta l4proto {{ tcp, udp }} masquerade to {ports}"
    everyone = f"iifname wan0 udp dport 1024-65535 dnat to {home}" if nat == "full" else ""
    everyone6 = 'iifname "wan0" meta nfproto ipv6 udp dport 1024-65535 accept' if nat == "full" else ""
    blocked = "meta l4proto udp drop" if nat == "udp-blocked" else ""
    # The router stays silent to what it does not expect: an ICMP error would end the other side's attempt.
    return f"""\
flush ruleset
table ip nat {{
  chain leaving {{
    type nat hook postrouting priority 100
    oifname "wan0" {mapping}
  }}
  chain arriving {{
    type nat hook prerouting priority -100
    {everyone}
  }}
}}
table inet filter {{
  chain to_router {{
    type filter hook input priority 0
    iifname "wan0" ct state established,related accept
    iifname "wan0" icmp type echo-request accept
    iifname "wan0" icmpv6 type echo-request accept
    iifname "wan0" drop
  }}
  chain through_router {{
    type filter hook forward priority 0
    {blocked}
    ct state established,related accept
    ct status dnat accept
    {everyone6}
    iifname "wan0" drop
  }}
}}
"""
