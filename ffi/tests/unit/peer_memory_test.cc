// Tests of the checks on addresses of workspaces. Needs no GPU.

#include "p2p/open/peer_memory.h"

#include <string>

#include "tests/unit/check.h"

namespace jax_ep::p2p {
namespace {

constexpr uint64_t kBytes = 4096;

PeerAddress GoodAddress() {
  PeerAddress address{};
  address.version = PeerAddress::kVersion;
  address.process = 7;
  address.bytes = kBytes;
  HostIdentity().copy(address.host, sizeof(address.host) - 1);
  address.device.bytes[3] = 5;
  address.memory.reserved[0] = 1;
  return address;
}

std::string WhyNot(const std::string& bytes) {
  PeerAddress address{};
  return PeerAddress::FromBytes(bytes, kBytes, &address).message;
}

TEST(GoodAddressComesBack) {
  const PeerAddress good = GoodAddress();
  PeerAddress address{};
  CHECK_EQ(PeerAddress::FromBytes(good.ToBytes(), kBytes, &address).message, "");
  CHECK_EQ(address.ToBytes() == good.ToBytes(), true);
  CHECK_EQ(IsSame(address.device, good.device), true);
  CHECK_EQ(IsSame(address.device, cudaUUID_t{}), false);
}

TEST(EachPartIsChecked) {
  CHECK_CONTAINS(WhyNot("short"), "got 5");
  PeerAddress address = GoodAddress();
  address.version = PeerAddress::kVersion + 1;
  CHECK_CONTAINS(WhyNot(address.ToBytes()), "version of jax_ep");
  address = GoodAddress();
  address.host[0] = '?';
  CHECK_CONTAINS(WhyNot(address.ToBytes()), "another host");
  address = GoodAddress();
  address.bytes = kBytes + 1;
  CHECK_CONTAINS(WhyNot(address.ToBytes()), "got 4097");
}

}  // namespace
}  // namespace jax_ep::p2p

int main() { return jax_ep::RunTests("peer_memory_test"); }
