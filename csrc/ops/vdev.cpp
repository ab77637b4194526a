// All-to-alls with sizes in tensors: torch.ops.symm_mem.all_to_all_vdev and its two-dimensional
// forms, which send tokens to experts and back.
//
// The ranks first gather all sizes, and each computes the place of every chunk. Then each rank
// copies its rows directly from the peers' memory, and waits for the others: from then on all ranks
// may overwrite their input.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "base/error.h"
#include "base/team.h"
#include "exchange/copy.h"
#include "memory/mapping.h"
#include "memory/slot_stores.h"
#include "ops/as_torch.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

// The words that a rank sends to its peers before the lengths and beginnings of its chunks.
enum Word : int64_t { kSequence, kOffset, kRoom, kWords };
// Values of kSequence for a rank without rows, or without a rendezvous.
constexpr int64_t kNoRows = -1, kNoRendezvous = -2;

struct Shuffle {
  const char* op;
  at::Tensor input, out, chunks, out_chunks;
  int64_t ranks, experts;  // of one rank
  bool by_rank;            // chunks of the input are in the order of ranks, then of experts
  bool placed;             // the caller gives the beginnings of chunks
  int64_t align;           // of each expert's first row in the output; 0: no gaps

  int64_t count() const { return ranks * experts; }
  int64_t row() const { return out.stride(0) * static_cast<int64_t>(out.element_size()); }
};

// The words, chunk lengths and chunk beginnings of all ranks.
class Table {
 public:
  explicit Table(const Shuffle& shuffle)
      : shuffle_(shuffle),
        width_(kWords + 2 * shuffle.count()),
        numbers_(static_cast<size_t>(shuffle.ranks * width_)) {}

  int64_t width() const { return width_; }
  int64_t* of(int64_t rank) { return numbers_.data() + rank * width_; }
  const int64_t* of(int64_t rank) const { return numbers_.data() + rank * width_; }
  int64_t word(int64_t rank, Word word) const { return of(rank)[word]; }

  // The sender of chunk `at` of a rank's output, and the chunk's place among the sender's chunks.
  struct Source {
    int64_t rank, chunk;
  };
  Source source(int64_t rank, int64_t at) const {
    const int64_t experts = shuffle_.experts, ranks = shuffle_.ranks;
    if (shuffle_.by_rank) return {at % ranks, rank * experts + at / ranks};
    return {at / experts, at % experts * ranks + rank};
  }
  int64_t length(const Source& source) const { return of(source.rank)[kWords + source.chunk]; }
  int64_t begin(const Source& source) const {
    return of(source.rank)[kWords + shuffle_.count() + source.chunk];
  }

  // Computes where the chunks of a rank's output begin; returns the number of rows that it needs.
  int64_t place(int64_t rank, std::vector<int64_t>& begins) const {
    const int64_t minor = shuffle_.by_rank ? shuffle_.ranks : shuffle_.experts;
    const int64_t align = shuffle_.align;
    begins.resize(static_cast<size_t>(shuffle_.count()));
    int64_t row = 0, end = 0;
    for (int64_t at = 0; at < shuffle_.count(); ++at) {
      if (align > 0 && at > 0 && at % minor == 0) {
        // Even an expert without tokens gets rows: grouped matmuls do not take empty groups.
        const int64_t first = begins[at - minor];
        row = first + std::max(align, (row - first + align - 1) / align * align);
      }
      begins[at] = row;
      row += length(source(rank, at));
      if (length(source(rank, at)) > 0) end = row;
    }
    return end;
  }

 private:
  const Shuffle& shuffle_;
  int64_t width_;
  std::vector<int64_t> numbers_;
};

void check_numbers(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong, op, ": ", name, " is ",
                   name_dtype(tensor.scalar_type()), ", must be torch.int64");
  kernels::check_dense(op, name, tensor);
}

void check(const Shuffle& shuffle, const char* chunks_name) {
  const auto [op, input, out, chunks, out_chunks, ranks, experts, by_rank, placed, align] = shuffle;
  check_has_dims(op, "input", input);
  check_has_dims(op, "out", out);
  for (const auto& [name, tensor] :
       {std::pair("input", &input), std::pair("out", &out), std::pair(chunks_name, &chunks),
        std::pair("out_splits_offsets", &out_chunks)}) {
    kernels::check_dense(op, name, *tensor);
    check_symmetric(op, name, *tensor);
  }
  TORCH_CHECK_TYPE(input.scalar_type() == out.scalar_type(), op, ": input is ",
                   name_dtype(input.scalar_type()), ", out is ", name_dtype(out.scalar_type()));
  TORCH_CHECK_VALUE(input.sizes().slice(1) == out.sizes().slice(1), op, ": rows of input are ",
                    input.sizes().slice(1), ", rows of out are ", out.sizes().slice(1));
  check_numbers(op, chunks_name, chunks);
  check_numbers(op, "out_splits_offsets", out_chunks);
  const int64_t lines = placed ? 2 : 1;
  TORCH_CHECK_VALUE(chunks.dim() == lines && (lines == 1 || chunks.size(0) == 2), op, ": ",
                    chunks_name, " has shape ", chunks.sizes(), ", must have ",
                    placed ? "2 dimensions: 2 rows (splits, offsets)" : "1 dimension");
  TORCH_CHECK_VALUE(experts > 0 && chunks.size(-1) == ranks * experts, op, ": ", chunks_name,
                    " has ", chunks.size(-1), " splits, must have ",
                    by_rank && !placed && align == 0 ? "one for each of " : "a multiple of ", ranks,
                    " ranks");
  TORCH_CHECK_VALUE(
      out_chunks.dim() == 2 && out_chunks.size(0) == 2 && out_chunks.size(1) == ranks * experts, op,
      ": out_splits_offsets has shape ", out_chunks.sizes(), ", must have [2, ", ranks * experts,
      "]");
  const auto* lengths = chunks.const_data_ptr<int64_t>();
  int64_t row = 0;
  for (int64_t i = 0; i < ranks * experts; ++i) {
    const int64_t begin = placed ? lengths[ranks * experts + i] : row;
    TORCH_CHECK_VALUE(lengths[i] >= 0 && begin >= 0 && begin <= input.size(0) - lengths[i], op,
                      ": split ", i, " of ", chunks_name, " is ", lengths[i], " rows from row ",
                      begin, ", but input has ", input.size(0), " rows");
    row += lengths[i];
  }
}

// Fills in this rank's numbers.
void describe(const Shuffle& shuffle, const Group& group, Table& table) {
  int64_t* own = table.of(group.rank());
  const int64_t count = shuffle.count();
  const auto* given = shuffle.chunks.const_data_ptr<int64_t>();
  int64_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    own[kWords + i] = given[i];
    own[kWords + count + i] = shuffle.placed ? given[count + i] : row;
    row += given[i];
  }
  own[kRoom] = shuffle.out.size(0);
  own[kSequence] = kNoRows;
  own[kOffset] = 0;
  if (shuffle.input.numel() == 0) return;
  const void* data = shuffle.input.const_data_ptr();
  const auto mapping = mapping_of(group, data);
  own[kSequence] = mapping == nullptr ? kNoRendezvous : mapping->sequence();
  own[kOffset] = *symmetric_offset(data);
}

// Gathers the numbers of all ranks; without a table, only waits until all ranks are here.
void meet(Group& group, const std::string& name, Table* table) {
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllGather;
  exchange.call_name = name;
  exchange.input.resize(1);
  exchange.output.resize(static_cast<size_t>(group.world_size()));
  if (table != nullptr) {
    const int64_t bytes = table->width() * static_cast<int64_t>(sizeof(int64_t));
    for (int rank = 0; rank < group.world_size(); ++rank)
      exchange.output[rank] = {table->of(rank), bytes};
    exchange.input[0] = exchange.output[group.rank()];
  }
  run(group, std::move(exchange));
}

// Raises an error that all ranks raise, so it is not reported to the peers.
template <class... Texts>
[[noreturn]] void fail_everywhere(const char* op, const Texts&... texts) {
  try {
    TORCH_CHECK_VALUE(false, op, ": ", texts...);
  } catch (const std::exception&) {
    throw Failed(std::current_exception());
  }
}

void check_room(const Shuffle& shuffle, const Table& table) {
  std::vector<int64_t> begins;
  for (int64_t rank = 0; rank < shuffle.ranks; ++rank) {
    const int64_t rows = table.place(rank, begins), room = table.word(rank, kRoom);
    if (rows > room)
      fail_everywhere(shuffle.op, "rank ", rank, " gets rows up to row ", rows,
                      ", but its out has ", room, " rows");
  }
}

// Returns the memory of the ranks' inputs. Collective if the inputs have no rendezvous yet.
std::shared_ptr<Mapping> input_of_all(const Shuffle& shuffle, Group& group, const Table& table) {
  int64_t sequence = kNoRows, giver = -1;
  for (int64_t rank = 0; rank < shuffle.ranks; ++rank) {
    const int64_t theirs = table.word(rank, kSequence);
    if (theirs == kNoRows) continue;
    if (giver >= 0 && theirs != sequence)
      fail_everywhere(shuffle.op, "inputs of ranks ", giver, " and ", rank,
                      " are of different rendezvous: allocate one tensor with symm_mem.empty() on "
                      "all ranks, call symm_mem.rendezvous() with it, and pass that one");
    sequence = theirs;
    giver = rank;
  }
  if (giver < 0) return nullptr;
  if (sequence != kNoRendezvous) {
    auto mapping = mapping_of(group, sequence);
    TORCH_CHECK_VALUE(
        mapping != nullptr, shuffle.op,
        ": input is empty, and this rank has freed its tensor of the rendezvous of the peers' "
        "inputs: keep it");
    return mapping;
  }
  for (int64_t rank = 0; rank < shuffle.ranks; ++rank)
    if (table.word(rank, kSequence) == kNoRows)
      fail_everywhere(shuffle.op, "input of rank ", rank,
                      " is empty and the other inputs have no rendezvous yet: call "
                      "symm_mem.rendezvous() on all ranks before");
  c10d::symmetric_memory::rendezvous(shuffle.input, group.name());
  return mapping_of(group, shuffle.input.const_data_ptr());
}

void take_rows(const Shuffle& shuffle, const Group& group, const Table& table,
               const Mapping* mapping) {
  std::vector<int64_t> begins;
  table.place(group.rank(), begins);
  const int64_t row = shuffle.row(), count = shuffle.count();
  int64_t rows = 0;
  for (int64_t at = 0; at < count; ++at) rows += table.length(table.source(group.rank(), at));
  auto* out = static_cast<char*>(shuffle.out.mutable_data_ptr());
  const Team team(mapping->cores());
  ResultStores::of_thread().run(rows * row, [&](bool past_caches) {
    // Each rank begins with its own rows and continues with the next rank's, so that no two ranks
    // read from the same rank at a time.
    for (int64_t step = 0; step < shuffle.ranks; ++step) {
      const int64_t from = (group.rank() + step) % shuffle.ranks;
      for (int64_t at = 0; at < count; ++at) {
        const auto source = table.source(group.rank(), at);
        const int64_t length = table.length(source);
        if (source.rank != from || length == 0) continue;
        const char* input =
            static_cast<const char*>(mapping->data()[from]) + table.word(from, kOffset);
        copy_bytes(out + begins[at] * row, input + table.begin(source) * row, length * row,
                   past_caches);
      }
    }
  });
  auto* found = shuffle.out_chunks.mutable_data_ptr<int64_t>();
  for (int64_t at = 0; at < count; ++at) {
    found[at] = table.length(table.source(group.rank(), at));
    found[count + at] = begins[at];
  }
}

void run_shuffle(const Shuffle& shuffle, Group& group) {
  std::vector<int64_t> row(shuffle.out.sizes().slice(1).vec());
  row.insert(row.begin(), shuffle.count());
  const std::string name =
      name_call(shuffle.op, shuffle.out.scalar_type(), row,
                "splits" + (shuffle.align > 1 ? " align " + std::to_string(shuffle.align) : ""));
  Table table(shuffle);
  describe(shuffle, group, table);
  meet(group, name, &table);
  check_room(shuffle, table);
  const auto mapping = input_of_all(shuffle, group, table);
  take_rows(shuffle, group, table, mapping.get());
  meet(group, name + " (end)", nullptr);
}

// `experts`: 0 to derive it from the number of splits.
bool call_shuffle(const char* op, const Arguments& arguments, int64_t experts, bool by_rank,
                  bool placed, const char* chunks_name, c10::function_ref<int64_t()> alignment) {
  return guarded_as_torch(op, arguments, 4, kSync, [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& chunks = arguments.tensor(2);
    const int64_t ranks = group->world_size();
    if (experts == 0 && chunks.dim() > 0) experts = chunks.size(-1) / ranks;
    const Shuffle shuffle{op,
                          arguments.tensor(0),
                          arguments.tensor(1),
                          chunks,
                          arguments.tensor(3),
                          ranks,
                          experts,
                          by_rank,
                          placed,
                          alignment()};
    check(shuffle, chunks_name);
    run_shuffle(shuffle, *group);
  });
}

constexpr const char* kFlat = "all_to_all_vdev";
constexpr const char* kDispatch = "all_to_all_vdev_2d";
constexpr const char* kCombine = "all_to_all_vdev_2d_offset";

void exchange(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  if (!call_shuffle(kFlat, arguments, 1, true, false, "in_splits", [] { return int64_t{0}; }))
    return call_python(op, stack);
  arguments.end();
}

void dispatch(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const auto alignment = [&] {
    const int64_t align = arguments.optional_number(5).value_or(1);
    TORCH_CHECK_VALUE(align > 0, kDispatch, ": major_align=", align, " must be positive");
    return align;
  };
  if (!call_shuffle(kDispatch, arguments, 0, true, false, "in_splits", alignment))
    return call_python(op, stack);
  arguments.end();
}

void combine(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  if (!call_shuffle(kCombine, arguments, 0, false, true, "in_splits_offsets",
                    [] { return int64_t{0}; }))
    return call_python(op, stack);
  arguments.end();
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl("all_to_all_vdev", torch::CppFunction::makeFromBoxedFunction<&exchange>());
  m.impl("all_to_all_vdev_2d", torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  m.impl("all_to_all_vdev_2d_offset", torch::CppFunction::makeFromBoxedFunction<&combine>());
}

}  // namespace symm_cp
