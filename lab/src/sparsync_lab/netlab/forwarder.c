// Carries packets between the network namespaces of the ranks, at a rate and with a delay. `forwarder.py` compiles and starts it.
//
// Each rank has one TUN device, `eth0` at 10.77.0.(rank + 1). A packet that rank s sends to rank r passes, in this order,
//   the link up of s      it leaves at max(now, when the link is free) + bytes * 8 / rate up;
//   the way               delay, and a jitter that never lets a packet overtake another one;
//   the link down of r    it arrives no sooner than the link down has carried its bytes.
// Bytes are those of Ethernet frames of 1514 bytes, in which the packet would travel. Nothing is lost: where more than `queue` bytes of a
// rank are under way, its device is not read, and its sockets wait.
//
// Arguments: bits per second up and down (0: no limit); delay, jitter and burst in nanoseconds; queue and the largest receive and send
// buffers of TCP in bytes; and for each rank a process id in its namespace. It says "ready" on standard output, takes the commands
// "cut RANK", "mend RANK" and "count" from standard input, and ends when standard input does.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 64, LONGEST = 65536 + sizeof(struct virtio_net_hdr), ETHERNET = 14, AT_ONCE = 32, OFFLOADED = TUN_F_CSUM | TUN_F_TSO4 };
#define NEVER INT64_MAX

typedef struct Packet {
	struct Packet *next;
	int64_t due, carried;  // when it comes to the end of its queue; how long the link up has carried it
	int64_t frame_bytes;
	int from, to, length;
	unsigned char content[];  // behind the header of virtio_net
} Packet;

typedef struct {
	Packet *first, *last;
} Queue;

static int ranks, device[MOST_RANKS], is_cut[MOST_RANKS];
static Queue on_the_way[MOST_RANKS], link_down[MOST_RANKS];  // by sender; by receiver. Each in order of due time
static int64_t up_free[MOST_RANKS], down_free[MOST_RANKS], held[MOST_RANKS];
static double up_bits_per_s, down_bits_per_s;
static int64_t delay_ns, jitter_ns, burst_ns, queue_bytes;
static long long carried_bytes;

static void fail(const char *format, ...) {
	const char *why = strerror(errno);
	va_list arguments;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, ": %s\n", why);
	exit(1);
}

static int64_t now_ns(clockid_t clock) {
	struct timespec now;
	clock_gettime(clock, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

static void append(Queue *queue, Packet *packet) {
	packet->next = NULL;
	if (queue->first)
		queue->last->next = packet;
	else
		queue->first = packet;
	queue->last = packet;
}

static Packet *take(Queue *queue) {
	Packet *packet = queue->first;
	queue->first = packet->next;
	return packet;
}

static int64_t head(const Queue *queue) { return queue->first ? queue->first->due : NEVER; }

// A number in [-1, 1) drawn for one sender and one point of time (splitmix64).
static double drawn(int from, int64_t point) {
	uint64_t x = 0x9e3779b97f4a7c15u * (uint64_t)(point * MOST_RANKS + from + 1);
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return (double)((x ^ (x >> 31)) >> 11) * 0x1p-52 - 1.0;
}

// The jitter goes along straight lines between points that are drawn every 4 jitters. It falls by half a second a second at most, so a
// packet that leaves later arrives later.
static int64_t jitter_at(int from, int64_t time) {
	if (!jitter_ns)
		return 0;
	int64_t apart = 4 * jitter_ns, point = time / apart;
	double share = (double)(time % apart) / (double)apart;
	return (int64_t)((double)jitter_ns * ((1 - share) * drawn(from, point) + share * drawn(from, point + 1)));
}

// The bytes on the wire: a packet of many segments has the headers of each of them.
static int64_t frame_bytes(const unsigned char *content, int length) {
	struct virtio_net_hdr header;
	memcpy(&header, content, sizeof header);
	int64_t ip = length - (int)sizeof header, segment = header.gso_size, headers = header.hdr_len;
	if (header.gso_type == VIRTIO_NET_HDR_GSO_NONE || !segment || ip <= headers)
		return ip + ETHERNET;
	int64_t frames = (ip - headers + segment - 1) / segment;
	return ip + frames * ETHERNET + (frames - 1) * headers;
}

static int64_t carrying_ns(int64_t bytes, double bits_per_s) {
	return bits_per_s > 0 ? (int64_t)((double)bytes * 8e9 / bits_per_s) : 0;
}

static void send_off(int from, const unsigned char *content, int length) {
	const unsigned char *ip = content + sizeof(struct virtio_net_hdr);
	int to = length >= (int)sizeof(struct virtio_net_hdr) + 20 && ip[0] >> 4 == 4 ? ip[19] - 1 : -1;
	if (to < 0 || to >= ranks || to == from || is_cut[from] || is_cut[to])
		return;
	Packet *packet = malloc(sizeof *packet + (size_t)length);
	if (!packet)
		fail("no memory for packets under way");
	memcpy(packet->content, content, (size_t)length);
	packet->from = from, packet->to = to, packet->length = length;
	packet->frame_bytes = frame_bytes(content, length);
	packet->carried = carrying_ns(packet->frame_bytes, up_bits_per_s);
	int64_t now = now_ns(CLOCK_MONOTONIC);
	up_free[from] = max(up_free[from], now - burst_ns) + packet->carried;
	int64_t leaves = max(now, up_free[from]);
	packet->due = leaves + delay_ns + jitter_at(from, leaves);
	held[from] += packet->frame_bytes;
	append(&on_the_way[from], packet);
}

// Its first bit came to the link down when its last one still waited for the link up, so a link down of the same rate adds nothing.
static void come_down(Packet *packet) {
	int64_t carrying = carrying_ns(packet->frame_bytes, down_bits_per_s), *is_free = &down_free[packet->to];
	*is_free = max(*is_free, packet->due - max(burst_ns, packet->carried)) + carrying;
	packet->due = max(packet->due, *is_free);
	append(&link_down[packet->to], packet);
}

static void deliver(Packet *packet) {
	// A rank that takes its interface down gets nothing.
	if (!is_cut[packet->from] && !is_cut[packet->to] && write(device[packet->to], packet->content, (size_t)packet->length) >= 0)
		carried_bytes += packet->frame_bytes;
	held[packet->from] -= packet->frame_bytes;
	free(packet);
}

// Move what is due, and return when the next packet is.
static int64_t move(void) {
	int64_t now = now_ns(CLOCK_MONOTONIC), next;
	for (int soonest = 0;; come_down(take(&on_the_way[soonest]))) {
		for (int rank = 0; rank < ranks; rank++)
			if (head(&on_the_way[rank]) < head(&on_the_way[soonest]))
				soonest = rank;
		next = head(&on_the_way[soonest]);
		if (next > now)
			break;
	}
	for (int rank = 0; rank < ranks; rank++) {
		for (int i = 0; i < AT_ONCE && head(&link_down[rank]) <= now; i++)
			deliver(take(&link_down[rank]));
		if (head(&link_down[rank]) < next)
			next = head(&link_down[rank]);
	}
	return next;
}

static void read_device(int rank) {
	static unsigned char content[LONGEST];
	for (int i = 0; i < AT_ONCE; i++) {
		ssize_t length = read(device[rank], content, sizeof content);
		if (length < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (length < (ssize_t)sizeof(struct virtio_net_hdr))
			fail("cannot read what rank %d sends", rank);
		send_off(rank, content, (int)length);
	}
}

static void obey(char *line) {
	int rank;
	if (sscanf(line, "cut %d", &rank) == 1 && rank >= 0 && rank < ranks)
		is_cut[rank] = 1;
	if (sscanf(line, "mend %d", &rank) == 1 && rank >= 0 && rank < ranks)
		is_cut[rank] = 0;
	printf("%lld\n", carried_bytes);
	fflush(stdout);
}

static void read_commands(void) {
	static char line[64];
	static size_t filled;
	ssize_t length = read(0, line + filled, sizeof line - 1 - filled);
	if (length <= 0)
		exit(0);
	filled += (size_t)length;
	line[filled] = 0;
	for (char *end; (end = strchr(line, '\n')); filled = strlen(line)) {
		*end = 0;
		obey(line);
		memmove(line, end + 1, strlen(end + 1) + 1);
	}
	if (filled == sizeof line - 1)
		exit(1);
}

static void set_buffers(const char *name, const char *usual, const char *most) {
	char path[64];
	snprintf(path, sizeof path, "/proc/sys/net/ipv4/%s", name);
	FILE *file = fopen(path, "w");
	if (!file || fprintf(file, "%s %s", usual, most) < 0 || fclose(file))
		fail("cannot set %s of a rank's network to %s bytes", name, most);
}

static int opened(const char *process, const char *most_received, const char *most_sent) {
	char path[64];
	snprintf(path, sizeof path, "/proc/%s/ns/net", process);
	int namespace = open(path, O_RDONLY | O_CLOEXEC);
	if (namespace < 0 || setns(namespace, CLONE_NEWNET))
		fail("cannot enter the network of process %s", process);
	close(namespace);
	int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (tun < 0)
		fail("cannot open /dev/net/tun");
	struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
	strcpy(request.ifr_name, "eth0");
	if (ioctl(tun, TUNSETIFF, &request))
		fail("cannot make a TUN device");
	if (ioctl(tun, TUNSETOFFLOAD, OFFLOADED))
		fail("the TUN device takes no packets of several segments");
	set_buffers("tcp_rmem", "4096 131072", most_received);
	set_buffers("tcp_wmem", "4096 16384", most_sent);
	return tun;
}

int main(int argc, char **argv) {
	if (argc < 10 || argc - 9 > MOST_RANKS)
		return 2;
	up_bits_per_s = atof(argv[1]), down_bits_per_s = atof(argv[2]);
	delay_ns = atoll(argv[3]), jitter_ns = atoll(argv[4]), burst_ns = atoll(argv[5]);
	queue_bytes = atoll(argv[6]);
	ranks = argc - 9;
	for (int rank = 0; rank < ranks; rank++)
		device[rank] = opened(argv[9 + rank], argv[7], argv[8]);
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	printf("ready\n");
	fflush(stdout);
	for (;;) {
		int64_t next = move();
		struct pollfd watched[1 + MOST_RANKS] = {{.fd = 0, .events = POLLIN}};
		for (int rank = 0; rank < ranks; rank++)
			watched[1 + rank] = (struct pollfd){.fd = held[rank] > queue_bytes ? -1 : device[rank], .events = POLLIN};
		int64_t wait = max(0, next - now_ns(CLOCK_MONOTONIC));
		struct timespec until = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
		if (ppoll(watched, (nfds_t)(1 + ranks), next == NEVER ? NULL : &until, NULL) < 0 && errno != EINTR)
			fail("cannot wait for packets");
		if (watched[0].revents)
			read_commands();
		for (int rank = 0; rank < ranks; rank++)
			if (watched[1 + rank].revents)
				read_device(rank);
	}
}
