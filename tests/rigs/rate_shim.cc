// SPDX-License-Identifier: Apache-2.0
//
// Counts what a process sends over TCP, and limits its rate, all connections together: a network
// adapter of that rate. Test code, loaded with LD_PRELOAD; never part of the package. It stands
// before the functions that send: send, sendto, sendmsg, sendmmsg, write and writev.
//
// JAX_EP_TEST_SEND_RATE is the rate in bytes per second; 0 or none: no limit. The process itself
// may ask and change it by the functions jax_ep_* at the end.
//
// A socket that does not block takes what there are tokens for, and otherwise says EAGAIN; it still
// polls as ready. Who waits for edges of epoll would then wait for ever, so there the call sleeps,
// and so it does on a socket that blocks.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace {

// Of one call of the kernel.
constexpr size_t kPieceBytes = 16 << 10;
// What may be sent at once after a pause: while its thread does other things, a process loses no
// time that a network adapter would use. tests/support/network_checks.py knows it, too.
constexpr double kDepthBytes = 256 << 10;
// The end of a wait, which is too short to sleep.
constexpr double kSpinS = 100e-6;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

void WaitUntil(double time) {
  for (double left; (left = time - Now()) > 0;) {
    if (left <= kSpinS) continue;
    const double seconds = left - kSpinS;
    const timespec pause = {static_cast<time_t>(seconds),
                            static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
    nanosleep(&pause, nullptr);
  }
}

// A bucket of tokens, one for each byte. It says how many there are by the time since which it has
// been filling.
class Bucket {
 public:
  void SetRate(double rate) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rate_ = rate;
    since_ = Now();
  }
  // Takes as many tokens as bytes; waits until there are so many.
  void Take(size_t bytes) {
    double until;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (rate_ <= 0) return;
      until = since_ = std::max(since_, Now() - kDepthBytes / rate_) + bytes / rate_;
    }
    WaitUntil(until);
  }
  // Takes tokens that are there: for all bytes, or at least for `least` of them; otherwise none.
  size_t TryToTake(size_t bytes, size_t least) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rate_ <= 0) return bytes;
    const double now = Now();
    since_ = std::max(since_, now - kDepthBytes / rate_);
    const double there = std::max(0.0, (now - since_) * rate_);
    const size_t taken = std::min(bytes, static_cast<size_t>(there));
    if (taken < std::min(bytes, least)) return 0;
    since_ += taken / rate_;
    return taken;
  }
  void Return(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rate_ > 0) since_ -= bytes / rate_;
  }

 private:
  std::mutex mutex_;
  double rate_ = 0, since_ = 0;
};

struct Limit {
  Bucket bucket;
  std::atomic<uint64_t> n_sent{0};

  // Never destroyed: other threads may send while the process ends.
  static Limit& Instance() {
    static Limit* const limit = [] {
      auto* const made = new Limit;
      const char* const rate = std::getenv("JAX_EP_TEST_SEND_RATE");
      made->bucket.SetRate(rate == nullptr ? 0 : std::atof(rate));
      return made;
    }();
    return *limit;
  }
};

template <class Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

ssize_t SendNow(int fd, const msghdr* message, int flags) {
  static auto* const next = Next(&sendmsg, "sendmsg");
  return next(fd, message, flags);
}

bool IsTcp(int fd) {
  const int error = errno;
  int protocol = 0;
  socklen_t size = sizeof(protocol);
  const bool is_socket = getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0;
  errno = error;
  return is_socket && protocol == IPPROTO_TCP;
}

// Whether somebody waits for edges of the file.
constexpr int kMaxFiles = 1 << 16;
std::atomic<bool> has_edges[kMaxFiles];

bool Sleeps(int fd, int flags) {
  if (fd < kMaxFiles && has_edges[fd]) return true;
  return (flags & MSG_DONTWAIT) == 0 && (fcntl(fd, F_GETFL) & O_NONBLOCK) == 0;
}

// The parts of a message from byte `first` on, `n_bytes` of them.
void FindParts(const msghdr& message, size_t first, size_t n_bytes, std::vector<iovec>* parts) {
  parts->clear();
  for (size_t i = 0; i < message.msg_iovlen && n_bytes > 0; ++i) {
    const iovec& part = message.msg_iov[i];
    const size_t skipped = std::min(first, part.iov_len);
    first -= skipped;
    const size_t n = std::min(part.iov_len - skipped, n_bytes);
    if (n > 0) parts->push_back({static_cast<uint8_t*>(part.iov_base) + skipped, n});
    n_bytes -= n;
  }
}

size_t Size(const msghdr& message) {
  size_t n_bytes = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) n_bytes += message.msg_iov[i].iov_len;
  return n_bytes;
}

// Tokens for a piece of `left` bytes; 0: none are there.
size_t TakeForPiece(Bucket& bucket, size_t left, bool sleeps) {
  const size_t n = std::min(left, kPieceBytes);
  if (!sleeps) return bucket.TryToTake(n, kPieceBytes / 4);
  bucket.Take(n);
  return n;
}

// What sendmsg does on a TCP socket.
ssize_t SendLimited(int fd, const msghdr* message, int flags) {
  Limit& limit = Limit::Instance();
  const bool sleeps = Sleeps(fd, flags);
  const size_t n_bytes = Size(*message);
  if (n_bytes == 0) return SendNow(fd, message, flags);
  std::vector<iovec> parts;
  msghdr piece = *message;
  size_t n_sent = 0;
  while (n_sent < n_bytes) {
    const size_t n = TakeForPiece(limit.bucket, n_bytes - n_sent, sleeps);
    FindParts(*message, n_sent, n, &parts);
    piece.msg_iov = parts.data();
    piece.msg_iovlen = parts.size();
    if (n == 0) errno = EAGAIN;
    const ssize_t result = n == 0 ? -1 : SendNow(fd, &piece, flags);
    const size_t taken = result > 0 ? result : 0;
    limit.bucket.Return(n - taken);
    limit.n_sent += taken;
    n_sent += taken;
    if (result < 0) return n_sent > 0 ? n_sent : result;
    piece.msg_control = nullptr;  // has gone with the first piece
    piece.msg_controllen = 0;
  }
  return n_sent;
}

ssize_t SendBytes(int fd, const void* data, size_t bytes, int flags) {
  iovec part = {const_cast<void*>(data), bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  return SendLimited(fd, &message, flags);
}

}  // namespace

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  return IsTcp(fd) ? SendLimited(fd, message, flags) : SendNow(fd, message, flags);
}

extern "C" int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  static auto* const next = Next(&epoll_ctl, "epoll_ctl");
  if (fd >= 0 && fd < kMaxFiles) {
    has_edges[fd] = operation != EPOLL_CTL_DEL && (event->events & EPOLLET) != 0;
  }
  return next(epoll, operation, fd, event);
}

extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static auto* const next = Next(&send, "send");
  return IsTcp(fd) ? SendBytes(fd, data, bytes, flags) : next(fd, data, bytes, flags);
}

// TCP ignores the address.
extern "C" ssize_t sendto(int fd, const void* data, size_t bytes, int flags, const sockaddr* to,
                          socklen_t size) {
  static auto* const next = Next(&sendto, "sendto");
  return IsTcp(fd) ? SendBytes(fd, data, bytes, flags) : next(fd, data, bytes, flags, to, size);
}

extern "C" int sendmmsg(int fd, mmsghdr* messages, unsigned int n, int flags) {
  static auto* const next = Next(&sendmmsg, "sendmmsg");
  if (!IsTcp(fd)) return next(fd, messages, n, flags);
  for (unsigned int i = 0; i < n; ++i) {
    const ssize_t result = SendLimited(fd, &messages[i].msg_hdr, flags);
    if (result < 0) return i > 0 ? static_cast<int>(i) : -1;
    messages[i].msg_len = result;
  }
  return n;
}

extern "C" ssize_t write(int fd, const void* data, size_t bytes) {
  static auto* const next = Next(&write, "write");
  return IsTcp(fd) ? SendBytes(fd, data, bytes, 0) : next(fd, data, bytes);
}

extern "C" ssize_t writev(int fd, const iovec* parts, int n) {
  static auto* const next = Next(&writev, "writev");
  if (!IsTcp(fd)) return next(fd, parts, n);
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = n;
  return SendLimited(fd, &message, 0);
}

// For the process itself: what it has sent, in bytes; and another rate.
extern "C" uint64_t jax_ep_sent_bytes() { return Limit::Instance().n_sent; }
extern "C" void jax_ep_limit_send_rate(double bytes_per_s) {
  Limit::Instance().bucket.SetRate(bytes_per_s);
}
