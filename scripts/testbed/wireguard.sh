#!/usr/bin/env bash
# Tries docs/slow_links.md's recipe on one machine, as root: a hub with a public address and a closed firewall, and two
# homes behind routers that translate addresses (NAT) and open no port. Trains three stages, a rank on each.
#
#     scripts/testbed/wireguard.sh CONFIG.toml [FLAGS of hybridpar train]
#
# Needs iproute2, nftables, wireguard-tools, and wireguard-go where the kernel has no module. Leaves nothing behind.
set -euo pipefail
hosts=(hub home1 home2 router1 router2)
work=$(mktemp -d)
trap down EXIT
umask 077

at() {  # HOST COMMAND..
    ip netns exec "hybridpar-$1" "${@:2}"
}

down() {
    for host in "${hosts[@]}"; do
        ip netns pids "hybridpar-$host" 2>/dev/null | xargs -r kill || true
        ip netns delete "hybridpar-$host" 2>/dev/null || true
    done
    rm -rf "$work"
}

cable() {  # NAME HOST ADDRESS HOST ADDRESS
    ip link add "$1" netns "hybridpar-$2" type veth peer name "$1" netns "hybridpar-$4"
    ip -n "hybridpar-$2" address add "$3" dev "$1" && ip -n "hybridpar-$2" link set "$1" up
    ip -n "hybridpar-$4" address add "$5" dev "$1" && ip -n "hybridpar-$4" link set "$1" up
}

for host in "${hosts[@]}"; do
    ip netns add "hybridpar-$host"
    ip -n "hybridpar-$host" link set lo up
    at "$host" sysctl -q -w net.ipv4.ip_forward=1
done
for i in 0 1 2; do
    mkdir "$work/$i"
    wg genkey >"$work/$i/private" && wg pubkey <"$work/$i/private" >"$work/$i/public"
    printf '[Interface]\nAddress = 10.8.0.%d/24\nPrivateKey = %s\nMTU = 1420\n' $((i + 1)) "$(<"$work/$i/private")" \
        >"$work/$i/wg$i.conf"
done
echo "ListenPort = 51820" >>"$work/0/wg0.conf"
for i in 1 2; do
    cable "wan$i" hub "203.0.113.$((4 * i + 1))/30" "router$i" "203.0.113.$((4 * i + 2))/30"
    cable "lan$i" "router$i" 192.168.1.1/24 "home$i" 192.168.1.2/24
    at "home$i" ip route add default via 192.168.1.1
    at "router$i" nft -f - <<END
        table ip home {
            chain out { type nat hook postrouting priority 100; oifname "wan$i" masquerade; }
            chain in { type filter hook forward priority 0; policy drop;
                       iifname "lan$i" accept; ct state established,related accept; }
        }
END
    printf '[Peer]\nPublicKey = %s\nAllowedIPs = 10.8.0.%d/32\n' "$(<"$work/$i/public")" $((i + 1)) >>"$work/0/wg0.conf"
    printf '[Peer]\nPublicKey = %s\nEndpoint = 203.0.113.%d:51820\nAllowedIPs = 10.8.0.0/24\nPersistentKeepalive = 25\n' \
        "$(<"$work/0/public")" $((4 * i + 1)) >>"$work/$i/wg$i.conf"
done
at hub nft -f - <<END
    table inet closed {
        chain in { type filter hook input priority 0; policy drop; iifname { "lo", "wg0" } accept; udp dport 51820 accept; }
    }
END

status=0 jobs=()
for i in 2 1 0; do  # wg0, wg1, wg2: wireguard-go has a socket by name, in files that these hosts share
    at "${hosts[i]}" wg-quick up "$work/$i/wg$i.conf" 2>"$work/$i/log"
    at "${hosts[i]}" env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="wg$i" python -m torch.distributed.run --nnodes 3 \
        --node-rank "$i" --nproc-per-node 1 --master-addr 10.8.0.1 --local-addr "10.8.0.$((i + 1))" \
        -m hybridpar train "$@" --parallel.pp 3 >>"$work/$i/log" 2>&1 &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || status=1; done
cat "$work/0/log"
[ $status = 0 ] || cat "$work"/[12]/log
at hub wg show wg0 transfer
exit $status
