// A link between network namespaces, in user space (netem is not in every kernel): each host has one TUN device, whose
// packets leave it at a fixed rate, arrive at a fixed rate at most, and do so a fixed delay after they left.
//
//     link DEVICE UP DOWN DELAY_MS QUEUE_KB CONTROL NAMESPACE...      addresses end in 1, 2, ... in their order
//
//     host i --- egress: one packet after the other, size / rate each --- ingress of host j, the same --- delay ---> j
//
// UP and DOWN, in Mbit/s, are egress and ingress of the first host, as of one behind a line of its own; the others have
// the larger of both. CONTROL is a FIFO, whose last byte says what is lost: `t` what the first host sends, `b` what is
// sent to it, `l` everything, `n` nothing.
//
// A packet that would wait behind more than QUEUE_KB is dropped, as a switch does; TCP then slows down. Prints "ready"
// once all devices exist. Runs with real-time priority if it may: on a machine whose cores all compute, an ordinary
// process would be late by milliseconds and stretch the delay. It holds the devices and stays in the last namespace.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <string>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#include <vector>

using Seconds = double;

struct Packet {
    Seconds due;
    std::vector<char> bytes;
};

struct Host {
    int device;
    double out_bytes_per_s, in_bytes_per_s;
    Seconds egress_free = 0, ingress_free = 0;  // when the packets accepted so far have passed
    std::deque<Packet> arriving{};               // in the order in which they are due
};

[[noreturn]] static void fail(const std::string& what) {
    fprintf(stderr, "link: %s: %s\n", what.c_str(), strerror(errno));
    exit(1);
}

static Seconds now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int open_tun(const std::string& space, const char* name) {
    int handle = open(("/var/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
    if (handle < 0 || setns(handle, CLONE_NEWNET)) fail("namespace " + space);
    close(handle);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (ioctl(device, TUNSETIFF, &request)) fail(std::string("device ") + name + " in " + space);
    return device;
}

struct Link {
    std::vector<Host> hosts;
    double queue_bytes;
    Seconds delay;
    int control;
    char lost = 'n';  // as CONTROL says

    bool is_lost(const Host& sender, const Host& receiver) const {
        return lost == 'l' || (lost == 't' && &sender == &hosts[0]) || (lost == 'b' && &receiver == &hosts[0]);
    }

    // Which host an IPv4 packet goes to; -1: none of ours (broadcasts, IPv6).
    int destination(const char* packet, ssize_t size) const {
        if (size < 20 || (packet[0] >> 4 & 15) != 4) return -1;
        int host = static_cast<unsigned char>(packet[19]) - 1;
        return host < static_cast<int>(hosts.size()) ? host : -1;
    }

    // Takes what `sender` wants to send.
    void accept(Host& sender) {
        char buffer[1 << 16];
        for (;;) {
            ssize_t size = read(sender.device, buffer, sizeof buffer);
            if (size < 0 && (errno == EAGAIN || errno == EIO)) return;  // EIO: the device is not up yet
            if (size <= 0) fail("read");
            int to = destination(buffer, size);
            if (to < 0) continue;
            Host& receiver = hosts[to];
            if (is_lost(sender, receiver)) continue;
            Seconds t = now(), leaves = size / sender.out_bytes_per_s, enters = size / receiver.in_bytes_per_s;
            Seconds sent = std::max(t, sender.egress_free) + leaves;
            // with one sender the ingress is free when the egress is: where it is no slower it adds nothing
            Seconds received = std::max(sent, std::max(sent - leaves, receiver.ingress_free) + enters);
            Seconds takes = std::max(leaves, enters);
            if ((received - takes - t) * size / takes > queue_bytes) continue;
            sender.egress_free = sent;
            receiver.ingress_free = received;
            receiver.arriving.push_back({received + delay, std::vector<char>(buffer, buffer + size)});
        }
    }

    // Delivers what is due; returns how long until the next packet is, or a negative number if there is none.
    Seconds deliver() {
        Seconds next = -1;
        for (Host& host : hosts) {
            auto& queue = host.arriving;
            for (; !queue.empty() && queue.front().due <= now(); queue.pop_front())
                if (write(host.device, queue.front().bytes.data(), queue.front().bytes.size()) < 0 && errno != EIO &&
                    errno != EAGAIN)
                    fail("write");
            if (!queue.empty()) {
                Seconds left = std::max(queue.front().due - now(), 0.0);
                next = next < 0 ? left : std::min(next, left);
            }
        }
        return next;
    }

    void run() {
        std::vector<pollfd> fds;
        for (Host& host : hosts) fds.push_back({host.device, POLLIN, 0});
        fds.push_back({control, POLLIN, 0});
        for (;;) {
            Seconds left = deliver();
            timespec wait{static_cast<time_t>(left), static_cast<long>(std::fmod(left, 1.0) * 1e9)};
            if (ppoll(fds.data(), fds.size(), left < 0 ? nullptr : &wait, nullptr) < 0 && errno != EINTR) fail("poll");
            if (fds.back().revents & POLLIN)
                while (read(control, &lost, 1) == 1) {
                }
            for (size_t i = 0; i < hosts.size(); i++) {
                if (fds[i].revents & POLLERR) exit(0);  // the device is gone, with its namespace
                if (fds[i].revents & POLLIN) accept(hosts[i]);
            }
        }
    }
};

int main(int count, char** words) {
    if (count < 9) {
        fprintf(stderr, "link DEVICE UP DOWN DELAY_MS QUEUE_KB CONTROL NAMESPACE NAMESPACE...\n");
        return 2;
    }
    double up = atof(words[2]) * 1e6 / 8, down = atof(words[3]) * 1e6 / 8, most = std::max(up, down);
    Link link{{}, atof(words[5]) * 1024, atof(words[4]) * 1e-3, open(words[6], O_RDWR | O_NONBLOCK | O_CLOEXEC)};
    if (link.control < 0) fail(words[6]);
    for (int i = 7; i < count; i++)
        link.hosts.push_back({open_tun(words[i], words[1]), i == 7 ? up : most, i == 7 ? down : most});
    sched_param priority{1};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("link: no real-time priority, delays are less exact");
    prctl(PR_SET_TIMERSLACK, 1000);
    puts("ready");
    fflush(stdout);
    link.run();
}
