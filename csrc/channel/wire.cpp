#include "channel/wire.h"

#include <type_traits>

#include "exchange/exchange.h"

namespace symm_cp {

namespace {

struct Field {
  const char* name;
  size_t offset;
  size_t bytes;
};

#define FIELD(Struct, name) \
  Field { #name, offsetof(Struct, name), sizeof(Struct::name) }

std::string line(const char* name, const char* text) {
  return std::string(name) + " " + text + "\n";
}

std::string line(const char* name, int64_t value) {
  return line(name, std::to_string(value).c_str());
}

template <size_t Count>
std::string line(const char* name, const char* const (&names)[Count]) {
  std::string all;
  for (const char* each : names) all += (all.empty() ? "" : ", ") + std::string(each);
  return line(name, all.c_str());
}

template <class Struct>
std::string line(const char* name, std::initializer_list<Field> fields) {
  static_assert(std::is_standard_layout_v<Struct>);
  std::string all = std::to_string(sizeof(Struct)) + " bytes:";
  for (const Field& field : fields)
    all += std::string(" ") + field.name + "@" + std::to_string(field.offset) + "+" +
           std::to_string(field.bytes);
  return line(name, all.c_str());
}

std::string enumerations() {
  return line("Space", kSpaceText) + line("Kind", kKindText) + line("StreamKind", kStreamKindText) +
         line("DType", kDTypeText) + line("ReduceOp", kReduceOpText) +
         line("ExchangeKind", kExchangeKindText) + line("LoopKind", kLoopKindText) +
         line("Buffer", kBufferText);
}

std::string structs() {
  using B = Box;
  using R = Reference;
  using C = Command;
  using L = LoopStep;
  using S = StreamCommand;
  using T = TraceEvent;
  using W = WorkspaceLayout;
  return line<R>("Reference", {FIELD(R, space), FIELD(R, index), FIELD(R, offset)}) +
         line<C>("Command",
                 {FIELD(C, kind), FIELD(C, peer), FIELD(C, flag), FIELD(C, lag), FIELD(C, to),
                  FIELD(C, source), FIELD(C, bytes), FIELD(C, rows), FIELD(C, to_pitch),
                  FIELD(C, from_pitch), FIELD(C, dtype), FIELD(C, mean), FIELD(C, first_source),
                  FIELD(C, sources), FIELD(C, piece)}) +
         line<Area>("Area", {FIELD(Area, buffer), FIELD(Area, rank), FIELD(Area, chunk)}) +
         line<L>("LoopStep", {FIELD(L, kind), FIELD(L, peer), FIELD(L, flag), FIELD(L, to),
                              FIELD(L, source), FIELD(L, first_source), FIELD(L, source_count)}) +
         line<B>("Box", {FIELD(B, peer), FIELD(B, piece), FIELD(B, operand), FIELD(B, offset),
                         FIELD(B, in_slot), FIELD(B, planes), FIELD(B, plane_pitch), FIELD(B, rows),
                         FIELD(B, pitch), FIELD(B, row)}) +
         line<S>(
             "StreamCommand",
             {FIELD(S, kind), FIELD(S, lane), FIELD(S, peer), FIELD(S, flag), FIELD(S, lag),
              FIELD(S, event), FIELD(S, alone), FIELD(S, remote), FIELD(S, to), FIELD(S, source),
              FIELD(S, bytes), FIELD(S, rows), FIELD(S, to_pitch), FIELD(S, from_pitch)}) +
         line<T>("TraceEvent", {FIELD(T, command), FIELD(T, start), FIELD(T, end), FIELD(T, epoch),
                                FIELD(T, engine), FIELD(T, call_name)}) +
         line<Record>("Record",
                      {FIELD(Record, epoch), FIELD(Record, failed), FIELD(Record, place),
                       FIELD(Record, pieces), FIELD(Record, sequence), FIELD(Record, offset),
                       FIELD(Record, digest), FIELD(Record, bytes), FIELD(Record, call_name)}) +
         line<Failure>("Failure", {FIELD(Failure, epoch), FIELD(Failure, other_channel),
                                   FIELD(Failure, other_number), FIELD(Failure, cause)}) +
         line<W>("WorkspaceLayout", {FIELD(W, flags), FIELD(W, flag_count), FIELD(W, records),
                                     FIELD(W, slots), FIELD(W, slot_bytes), FIELD(W, slot_count)});
}

std::string limits() {
  return line("FLAG_BYTES", kFlagBytes) + line("FLAG_OF_WRITER", flag_offset(1, 2, 3)) +
         line("SENT_ONE", sent_offset(kConstantOne, 2, 3)) + line("LAST_EPOCH", kLastEpoch) +
         line("PIECE_BITS", int64_t{kPieceBits}) + line("EXCHANGE_PIECE", kPieceBytes) +
         line("EXCHANGE_PART", kPartAlignment) + line("LAST_CPU_EPOCH", kLastCpuEpoch) +
         line("SIZES_BYTES", sizes_bytes(9)) + line("RECORD_BYTES", kRecordBytes) +
         line("MAX_CALL_NAME", static_cast<int64_t>(kMaxCallName)) + line("FAILURES", kFailures) +
         line("PAGE_BYTES", kPageBytes) + line("SLOTS", kSlots);
}

}  // namespace

std::string wire_description() {
  static_assert(std::size(kFlagNames) == kDeviceFlags && std::size(kChannelNames) == kChannels);
  return enumerations() + structs() + line("CHANNELS", kChannelNames) +
         line("DEVICE_FLAGS", kFlagNames) + line("FLAGS", int64_t{kFlags}) + limits();
}

}  // namespace symm_cp
