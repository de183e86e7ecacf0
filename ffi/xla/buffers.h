// The buffers of a call in order, and a reader that checks one after the other.
//
// Handlers bind all operands and all results as "remaining" ones, so that names, dtypes and shapes
// are stated once, in read_operands.cc, for both platforms. Nothing here allocates unless a check
// fails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/element_types.h"
#include "core/shape.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// The operands or the results of a call.
class BufferList {
 public:
  // More buffers than any call has. Further ones are dropped; the count is then still too large for
  // any reader.
  static constexpr size_t kMaxSize = 24;

  BufferList() = default;
  explicit BufferList(const ffi::RemainingArgs& operands);
  explicit BufferList(const ffi::RemainingRets& results);

  size_t size() const { return size_; }
  // Null if there is no such buffer.
  const ffi::AnyBuffer* Find(size_t index) const {
    return index < size_ ? &*buffers_[index] : nullptr;
  }

  // Splits off the last `n` buffers; n is at most size().
  BufferList TakeLast(size_t n);
  // Replaces a buffer.
  void Replace(size_t index, const ffi::AnyBuffer& buffer) { buffers_[index].emplace(buffer); }

 private:
  template <class Remaining, class Get>
  void Fill(const Remaining& remaining, const Get& get);

  std::array<std::optional<ffi::AnyBuffer>, kMaxSize> buffers_;
  size_t size_ = 0;
};

// Checks that no result shares memory with an operand or with another result. XLA sees to that
// unless a program was changed by hand: handlers check what they read before they write, and their
// threads write in any order.
Status CheckDisjoint(const BufferList& operands, const BufferList& results);

// The dtypes of rows and of tokens given to dispatch; nothing for other dtypes.
std::optional<RowType> ToRowType(ffi::DataType type);
// The dtypes of rows that combine takes.
std::optional<RowType> ToSumType(ffi::DataType type);
// The dtype of a row of such elements: uint8 if they are packed.
ffi::DataType ToDataType(Element element, bool is_packed);
ffi::DataType ToDataType(ScaleType type);
// For messages: "int32".
const char* Name(ffi::DataType type);

// Reads the buffers of a list one after the other. The first check that fails sets `status`; the
// pointers that are read afterwards may be null.
class BufferReader {
 public:
  BufferReader(const BufferList& buffers, Status& status) : buffers_(buffers), status_(status) {}

  // The size of an axis; kAnySize if there is no such buffer or axis, which the check of the
  // buffer's shape then reports.
  int64_t Dim(size_t index, size_t axis) const;
  // INVALID if there is no such buffer.
  ffi::DataType Type(size_t index) const;

  // The data of the next buffer, which must have this dtype and shape.
  void* Next(const char* name, ffi::DataType type, const Shape& shape);
  template <class T>
  T* Next(const char* name, const Shape& shape) {
    return static_cast<T*>(Next(name, DataTypeOf<T>(), shape));
  }

  // Checks that no buffer is left.
  void ExpectEnd(const char* what);

 private:
  template <class T>
  static constexpr ffi::DataType DataTypeOf();

  void Fail(const char* name, const char* expected, const char* got);
  void Fail(const char* name, const Shape& shape, const ffi::AnyBuffer& buffer);

  const BufferList& buffers_;
  Status& status_;
  size_t next_ = 0;
};

template <>
constexpr ffi::DataType BufferReader::DataTypeOf<int32_t>() {
  return ffi::S32;
}
template <>
constexpr ffi::DataType BufferReader::DataTypeOf<uint32_t>() {
  return ffi::U32;
}
template <>
constexpr ffi::DataType BufferReader::DataTypeOf<float>() {
  return ffi::F32;
}

}  // namespace jax_ep
