#!/bin/sh
# Runs a command on each of RANKS ranks over links of 100 Mbit/s that ip and tc make, without sparsync: what `sparsync launch --link 100mbit`
# is compared with by studies/launch_by_hand.py. It needs root.
#
#     studies/network_by_hand.sh RANKS COMMAND...
set -eu
ranks=$1
shift
last=$((ranks - 1))
name=by-hand-$$
# The parameters that docs/measuring.md gives for 100 Mbit/s.
bucket="rate 100mbit burst 9278 limit $((ranks * 4194304)) peakrate 1tbit mtu 1514"

remove() {
    for namespace in switch $(seq 0 $last); do
        ip netns pids "$name-$namespace" 2>/dev/null | xargs -r kill -KILL
        ip netns delete "$name-$namespace" 2>/dev/null || true
    done
}
trap remove EXIT
trap 'exit 130' INT TERM

ip netns add "$name-switch"
ip -n "$name-switch" link add switch0 type bridge mcast_snooping 0
ip -n "$name-switch" link set switch0 addrgenmode none
ip -n "$name-switch" link set switch0 up
for rank in $(seq 0 $last); do
    ip netns add "$name-$rank"
    ip -n "$name-switch" link add "port$rank" type veth peer name eth0 netns "$name-$rank"
    ip -n "$name-switch" link set "port$rank" addrgenmode none master switch0 up
    ip -n "$name-$rank" link set lo up
    ip -n "$name-$rank" link set eth0 addrgenmode none gso_max_segs 8
    ip -n "$name-$rank" address add "10.78.0.$((rank + 1))/24" dev eth0
    ip -n "$name-$rank" link set eth0 up
    ip -n "$name-$rank" route change 10.78.0.0/24 dev eth0 src "10.78.0.$((rank + 1))" congctl cubic
    tc -n "$name-switch" qdisc add dev "port$rank" root tbf $bucket
    tc -n "$name-$rank" qdisc add dev eth0 root tbf $bucket
done

# In sessions of their own, as with sparsync launch: on a busy machine Linux shares the processors among sessions, not processes.
started=
for rank in $(seq 0 $last); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=10.78.0.1 MASTER_PORT=29500 \
        GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 setsid ip netns exec "$name-$rank" "$@" &
    started="$started $!"
done
for process in $started; do
    wait "$process"
done
