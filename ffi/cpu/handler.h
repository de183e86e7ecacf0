// What the handlers of the host transport share: who is calling, checks of buffers, and the meeting
// of the ranks. No handler waits: each returns a future.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "cpu/call_site.h"
#include "cpu/combine.h"
#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// What XLA tells a handler besides its buffers. Lives as long as the handler runs.
struct Call {
  const char* operation;
  CallSite* site;
  ffi::RunId run;
  int32_t ordinal;
  ffi::ThreadPool* pool;

  const EpConfig& config() const { return site->config; }
  std::string Name() const { return std::string(operation) + " of group " + site->group; }
  Status Invalid(const std::string& what) const { return InvalidArgument(Name() + ": " + what); }
};

// Finds the calling device's place in the group; fills the fields of RankArgs.
Status FindPlace(const Call& call, int32_t place_index, int64_t n_tokens, RankArgs& args);

// Checks that every choice with a row has an expert, and that the row exists: a layout from
// elsewhere would be read, and written, out of bounds.
Status CheckLayout(const Call& call, const int32_t* topk_ids, const int32_t* dst_rows,
                   int64_t n_choices);

// Ends the run for all its ranks: one that failed never comes to the calls that follow.
ffi::Future FailRun(const Call& call, const Status& status);

// Lets this rank arrive. The last one does `work`, and has all of them completed.
using Work = void (*)(const Pool&, const std::vector<Arrival>&);
ffi::Future Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work);

Status ToRowType(const Call& call, ffi::DataType type, RowType& row_type);

// Notes the first buffer whose shape is not the expected one.
class ShapeCheck {
 public:
  explicit ShapeCheck(const Call& call) : call_(call) {}

  template <class Buffer>
  ShapeCheck& Expect(const char* name, const Buffer& buffer, const std::vector<int64_t>& expected) {
    const auto dimensions = buffer.dimensions();
    Compare(name, {dimensions.begin(), dimensions.end()}, expected);
    return *this;
  }

  const Status& status() const { return status_; }

 private:
  void Compare(const char* name, const std::vector<int64_t>& got,
               const std::vector<int64_t>& expected);

  const Call& call_;
  Status status_;
};

// Reads the optional operands, or results, one after the other.
template <class Remaining>
class OptionalBuffers {
 public:
  explicit OptionalBuffers(Remaining remaining) : remaining_(remaining) {}

  // Null if there is no such buffer, which the shape check then notes.
  template <class Buffer, class Pointer>
  void Next(const char* name, const std::vector<int64_t>& shape, ShapeCheck& shapes,
            Pointer& pointer) {
    auto buffer = remaining_.template get<Buffer>(next_++);
    if (!buffer.has_value()) {
      shapes.Expect(name, NoBuffer{}, shape);
      return;
    }
    shapes.Expect(name, Dereference(*buffer), shape);
    pointer = static_cast<Pointer>(Dereference(*buffer).untyped_data());
  }

 private:
  struct NoBuffer {
    std::vector<int64_t> dimensions() const { return {-1}; }
  };

  template <class Buffer>
  static const Buffer& Dereference(const Buffer& buffer) {
    return buffer;
  }
  template <class Buffer>
  static Buffer& Dereference(ffi::Result<Buffer>& result) {
    return *result;
  }

  Remaining remaining_;
  size_t next_ = 0;
};

}  // namespace jax_ep
