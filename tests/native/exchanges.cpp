// Exchanges between ranks as threads of one process: random kinds, sizes, places, channels and
// threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "exchange/reduce.h"
#include "exchanges.h"

namespace native_test {

using namespace symm_cp;

// --- loops ---------------------------------------------------------------------------------------

std::vector<Loops> read_loops(const char* path, int* world_size) {
  std::ifstream file(path, std::ios::binary);
  int64_t head[2];
  read(file, head, 2);
  *world_size = static_cast<int>(head[0]);
  std::vector<Loops> all(static_cast<size_t>(head[1]));
  for (Loops& loops : all) {
    read(file, &loops.kind);
    read(file, &loops.channel);
    read(file, &loops.loop_kind);
    for (int rank = 0; rank < *world_size; ++rank) {
      int64_t sizes[2];
      read(file, sizes, 2);
      std::vector<Command> steps(static_cast<size_t>(sizes[0]));
      std::vector<Place> sources(static_cast<size_t>(sizes[1]));
      read(file, steps.data(), steps.size());
      read(file, sources.data(), sources.size());
      loops.by_rank.emplace_back(std::move(steps), std::move(sources));
    }
  }
  return all;
}

// Without the waits for a flag; what a rank does before its first wait stays the same.
void install(Rank& rank, const std::vector<Loops>& all, int skip) {
  for (const Loops& loops : all) {
    Loop loop = loops.by_rank[static_cast<size_t>(rank.rank())];
    std::erase_if(loop.steps, [&](const Command& step) {
      return step.kind == Kind::kWait && step.flag == skip;
    });
    rank.group->set_loop(static_cast<int>(loops.channel), static_cast<ExchangeKind>(loops.kind),
                         static_cast<LoopKind>(loops.loop_kind), std::move(loop));
  }
}

Exchange named(ExchangeKind kind, const std::string& call_name) {
  Exchange exchange{};
  exchange.kind = kind;
  exchange.call_name = call_name;
  return exchange;
}

}  // namespace native_test

namespace {

using namespace symm_cp;
using namespace native_test;
using std::chrono::seconds;

using Kind = ExchangeKind;
constexpr Kind kKinds[] = {Kind::kAllGather, Kind::kAllReduce, Kind::kTwoShotAllReduce,
                           Kind::kReduceScatter, Kind::kAllToAll};
constexpr size_t kRegions = 3;  // of symmetric memory
constexpr size_t kRegionBytes = kLargest + 4096;

// --- random exchanges ----------------------------------------------------------------------------

// What all ranks know of an exchange.
struct Planned {
  size_t number;
  Kind kind;
  DType dtype;
  bool asynchronous;
  bool in_place;
  bool shares;  // the output takes the memory of the input, where it can
  int giver;    // the only rank that gives anything, or -1
  int taker;    // the only rank that takes anything, or -1
  bool several_pieces;
  std::vector<int64_t> bytes;  // that each rank gives for each part

  int64_t given(int source, size_t part, size_t parts) const {
    return bytes[static_cast<size_t>(source) * parts + part];
  }
};

size_t parts_of(Kind kind, int world_size) {
  return kind == Kind::kAllGather || kind == Kind::kAllReduce ? 1 : static_cast<size_t>(world_size);
}

int64_t size_of(std::mt19937& random, size_t parts, int64_t largest) {
  const auto room = kPieceBytes / static_cast<int64_t>(parts) / kPartAlignment * kPartAlignment;
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random()) % limit; };
  int64_t size = 0;
  switch (random() % 8) {
    case 0: size = 0; break;
    case 1: size = 1 + below(64); break;
    case 2: size = (1 + below(2)) * room - 4 + below(3) * 4; break;  // at the ends of pieces
    case 3: size = below(kLargest / static_cast<int64_t>(parts)); break;
    default: size = below(10000); break;
  }
  return size > largest ? size % largest : size;
}

Planned plan_one(std::mt19937& random, size_t number, int world_size, int64_t largest) {
  Planned planned{};
  planned.number = number;
  planned.kind = kKinds[random() % std::size(kKinds)];
  planned.dtype = random() % 2 == 0 ? DType::kUint8 : DType::kFloat32;
  planned.asynchronous = random() % 2 == 0;
  planned.in_place = planned.kind != Kind::kAllToAll && random() % 3 == 0;
  planned.shares = random() % 3 == 0;
  planned.giver = planned.taker = -1;
  const auto one_rank = static_cast<int>(random() % static_cast<unsigned>(world_size));
  const bool gathers = planned.kind == Kind::kAllGather, sums = planned.kind == Kind::kAllReduce;
  // Broadcast, scatter; gather, reduce.
  if ((gathers || planned.kind == Kind::kAllToAll) && random() % 4 == 0) planned.giver = one_rank;
  if ((gathers || sums) && planned.giver < 0 && random() % 4 == 0) planned.taker = one_rank;
  const size_t parts = parts_of(planned.kind, world_size);
  const bool each = gathers || planned.kind == Kind::kAllToAll;  // gives what it wants
  planned.bytes.resize(static_cast<size_t>(world_size) * parts);
  for (int rank = 0; rank < world_size; ++rank)
    for (size_t part = 0; part < parts; ++part) {
      int64_t size = size_of(random, parts, largest) / element_bytes(planned.dtype) *
                     element_bytes(planned.dtype);
      if (planned.giver >= 0 && planned.giver != rank) size = 0;
      if (!each && rank > 0) size = planned.bytes[part];
      planned.bytes[static_cast<size_t>(rank) * parts + part] = size;
      planned.several_pieces = planned.several_pieces || size > 4096;
    }
  if (planned.giver >= 0) planned.in_place = false;
  return planned;
}

std::vector<Planned> plan_all(unsigned seed, size_t count, int world_size, int64_t largest) {
  std::mt19937 random(seed);
  std::vector<Planned> plan;
  for (size_t i = 0; i < count; ++i) plan.push_back(plan_one(random, i, world_size, largest));
  return plan;
}

// What those ranks give for a part, summed up; sums of 4 ranks fit into a byte. It repeats after
// kPeriod elements, of which no piece has a multiple.
std::vector<char> content_of(const Planned& planned, const std::vector<int>& sources, size_t part,
                             int64_t bytes) {
  constexpr size_t kPeriod = 61;
  const auto size = static_cast<size_t>(element_bytes(planned.dtype));
  std::vector<char> content(std::max(static_cast<size_t>(bytes), kPeriod * size));
  for (size_t element = 0; element < kPeriod; ++element) {
    size_t sum = 0;
    for (const int source : sources)
      sum += (planned.number * 5 + static_cast<size_t>(source) * 31 + part * 17 + element * 7) %
             kPeriod;
    const auto number = static_cast<float>(sum);
    const auto byte = static_cast<uint8_t>(sum);
    const void* from = &number;
    if (planned.dtype == DType::kUint8) from = &byte;
    std::memcpy(&content[element * size], from, size);
  }
  for (size_t done = kPeriod * size; done < content.size(); done *= 2)
    std::memcpy(&content[done], &content[0], std::min(done, content.size() - done));
  content.resize(static_cast<size_t>(bytes));
  return content;
}

// The memory of one part, at any address, contiguous or in rows with gaps, in any order.
struct Memory {
  std::vector<char> bytes;
  std::vector<int64_t> numbers;
  Extent extent;

  // Calls `visit(at, offset, bytes)` for each run of bytes.
  template <class F>
  void each_row(F visit) const {
    const int64_t row = extent.row == 0 ? extent.bytes : extent.row;
    for (int64_t i = 0; i * row < extent.bytes; ++i) {
      const int64_t number = extent.numbers == nullptr ? i : extent.numbers[i];
      visit(static_cast<char*>(extent.data) + number * extent.pitch, i * row,
            static_cast<size_t>(std::min(row, extent.bytes - i * row)));
    }
  }
  void fill(const std::vector<char>& content) const {
    each_row([&](char* at, int64_t offset, size_t bytes) {
      std::memcpy(at, content.data() + offset, bytes);
    });
  }
  void overwrite() const {
    each_row([](char* at, int64_t, size_t bytes) { std::memset(at, -1, bytes); });
  }
  void expect_content(const std::vector<char>& content, const std::string& name) const {
    each_row([&](const char* at, int64_t offset, size_t bytes) {
      expect(std::memcmp(at, content.data() + offset, bytes) == 0, name + " has a wrong result");
    });
  }
};

Memory memory_of(int64_t size, bool rows, std::mt19937& random) {
  Memory memory;
  const int64_t offset = static_cast<int64_t>(random() % 3);
  int64_t room = size;
  memory.extent.bytes = size;
  if (rows && size > 0 && random() % 3 == 0) {
    Extent& extent = memory.extent;
    extent.row = 100 + static_cast<int64_t>(random() % 9000);
    extent.pitch = extent.row + static_cast<int64_t>(random() % 100);
    const int64_t count = (size + extent.row - 1) / extent.row;
    room = count * extent.pitch;
    if (random() % 2 == 0) {
      memory.numbers.resize(static_cast<size_t>(count));
      std::iota(memory.numbers.begin(), memory.numbers.end(), int64_t{0});
      std::shuffle(memory.numbers.begin(), memory.numbers.end(), random);
      extent.numbers = memory.numbers.data();
    }
  }
  memory.bytes.assign(static_cast<size_t>(offset + room), 0);
  memory.extent.data = memory.bytes.data() + offset;
  return memory;
}

// An exchange of a rank under way: its memory must stay.
struct Flying {
  explicit Flying(const Planned& all) : planned(&all) {}
  const Planned* planned;
  std::vector<Memory> input, output;
  int64_t number = 0;
  std::shared_ptr<std::atomic<int>> ended = std::make_shared<std::atomic<int>>(0);
};

class Exchanger {
 public:
  Exchanger(Rank& rank, int skip) : rank_(rank), skip_(skip) {
    for (size_t i = 0; i < kRegions; ++i) {
      regions_.push_back(Segment::create(kRegionBytes, "region"));
      rank_.map(regions_.back());
    }
  }

  // Carries exchanges out, in order; those of one channel or of both.
  void carry_out(const std::vector<Planned>& plan, unsigned seed, bool sync, bool asynchronous) {
    std::mt19937 random(seed + static_cast<unsigned>(rank_.rank()));
    std::vector<Flying> in_flight;
    const auto finish_any = [&] {
      const auto at = static_cast<std::ptrdiff_t>(random() % in_flight.size());
      finish(in_flight[static_cast<size_t>(at)]);
      in_flight.erase(in_flight.begin() + at);
    };
    for (const Planned& planned : plan) {
      if (!(planned.asynchronous ? asynchronous : sync)) continue;
      // Another exchange may still read the region: this one's input is filled after its end.
      const auto uses_region = [](const Flying& each) { return each.planned->in_place; };
      while (planned.asynchronous && planned.in_place &&
             std::any_of(in_flight.begin(), in_flight.end(), uses_region))
        finish_any();
      while (in_flight.size() > random() % 5) finish_any();
      Flying flying = prepare(planned, random);
      begin(flying, random);
      if (planned.asynchronous)
        in_flight.push_back(std::move(flying));
      else
        check(flying);
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
    while (!in_flight.empty()) finish_any();
  }

 private:
  Flying prepare(const Planned& planned, std::mt19937& random) {
    Flying flying(planned);
    const int world_size = rank_.world_size(), own = rank_.rank();
    const size_t parts = parts_of(planned.kind, world_size);
    const bool rows = planned.kind == Kind::kAllGather || planned.kind == Kind::kAllToAll;
    // The two channels use different ones.
    const Segment& region = regions_[planned.asynchronous ? 0 : 1 + planned.number % 2];
    char* symmetric = region.data() + planned.number % 5;
    for (size_t part = 0; part < parts; ++part) {
      const int64_t bytes = planned.given(own, part, parts);
      Memory memory = memory_of(planned.in_place ? 0 : bytes, rows && !planned.in_place, random);
      if (planned.in_place) {
        memory.extent.data = symmetric;
        memory.extent.bytes = bytes;
        symmetric += bytes;
      }
      memory.fill(content_of(planned, {own}, part, bytes));
      flying.input.push_back(std::move(memory));
    }
    const bool takes = planned.taker < 0 || planned.taker == own;
    for (int each = 0; each < outputs(planned); ++each) {
      int64_t bytes = 0;
      switch (planned.kind) {
        case Kind::kAllGather: bytes = planned.given(each, 0, parts); break;
        case Kind::kAllReduce: bytes = planned.given(own, 0, parts); break;
        case Kind::kTwoShotAllReduce: bytes = planned.given(own, each, parts); break;
        case Kind::kReduceScatter: bytes = planned.given(own, own, parts); break;
        case Kind::kAllToAll: bytes = planned.given(each, own, parts); break;
        default: break;  // others are not planned
      }
      flying.output.push_back(memory_of(takes ? bytes : 0, rows, random));
      if (const Memory* input = shared_input(flying, each); takes && input != nullptr)
        flying.output.back().extent = input->extent;
    }
    return flying;
  }

  int outputs(const Planned& planned) const {
    const bool one = planned.kind == Kind::kAllReduce || planned.kind == Kind::kReduceScatter;
    return one ? 1 : rank_.world_size();
  }

  const Memory* shared_input(const Flying& flying, int output) const {
    const Planned& planned = *flying.planned;
    if (!planned.shares) return nullptr;
    switch (planned.kind) {
      // Peers read all of a symmetric tensor, but only their own part in two shots.
      case Kind::kAllReduce: return planned.in_place ? nullptr : &flying.input[0];
      case Kind::kTwoShotAllReduce: return &flying.input[static_cast<size_t>(output)];
      case Kind::kAllGather: return output == rank_.rank() ? &flying.input[0] : nullptr;
      case Kind::kReduceScatter:
        return planned.in_place ? nullptr : &flying.input[static_cast<size_t>(rank_.rank())];
      default: return nullptr;
    }
  }

  void begin(Flying& flying, std::mt19937& random) {
    const Planned& planned = *flying.planned;
    Exchange exchange = named(planned.kind, "exchange " + std::to_string(planned.number));
    for (const Memory& memory : flying.input) exchange.input.push_back(memory.extent);
    for (const Memory& memory : flying.output) exchange.output.push_back(memory.extent);
    exchange.dtype = planned.dtype;
    exchange.in_place = planned.in_place;
    try {
      if (!planned.asynchronous) return run(*rank_.group, std::move(exchange));
      // Peers may need this rank after its data has left, before it waits.
      const bool background = planned.in_place || planned.several_pieces ||
                              planned.kind == Kind::kTwoShotAllReduce || random() % 2 == 0;
      const auto done = [ended = flying.ended, skip = skip_](const std::string& failure) {
        expect(failure.empty() || skip >= 0, failure);
        ++*ended;
      };
      const Started started = start(*rank_.group, std::move(exchange), background, done);
      flying.number = started.number;
      if (!started.published || planned.shares || skip_ >= 0) return;
      for (const Memory& memory : flying.input) memory.overwrite();
    } catch (const std::exception& error) {
      expect(skip_ >= 0, error.what());  // without a wait, ranks may find that others have gone on
    }
  }

  void finish(Flying& flying) {
    try {
      rank_.group->lane().wait(flying.number);
    } catch (const std::exception& error) {
      expect(skip_ >= 0, error.what());
    }
    // It may be told after those who wait.
    while (skip_ < 0 && *flying.ended == 0) std::this_thread::yield();
    expect(skip_ >= 0 || *flying.ended == 1, "an exchange has ended twice");
    check(flying);
  }

  void check(Flying& flying) {
    const Planned& planned = *flying.planned;
    std::vector<int> everybody;
    for (int rank = 0; rank < rank_.world_size(); ++rank) everybody.push_back(rank);
    const bool by_source = planned.kind == Kind::kAllGather || planned.kind == Kind::kAllToAll;
    for (size_t at = 0; skip_ < 0 && at < flying.output.size(); ++at) {
      const auto own = static_cast<size_t>(rank_.rank());
      const bool for_own = planned.kind == Kind::kReduceScatter || planned.kind == Kind::kAllToAll;
      const size_t part = planned.kind == Kind::kTwoShotAllReduce ? at : for_own ? own : 0;
      const auto sources = by_source ? std::vector<int>{static_cast<int>(at)} : everybody;
      const Memory& output = flying.output[at];
      const std::string name = "exchange " + std::to_string(planned.number) + " of kind " +
                               std::to_string(static_cast<int>(planned.kind));
      output.expect_content(content_of(planned, sources, part, output.extent.bytes), name);
    }
    // The caller's again.
    for (const Memory& memory : flying.input) memory.overwrite();
    for (const Memory& memory : flying.output) memory.overwrite();
  }

  Rank& rank_;
  int skip_;
  std::vector<Segment> regions_;
};

void exchange_random(const std::vector<Loops>& loops, int world_size, unsigned seed, int skip) {
  // Without a wait, ranks must not read past the slots.
  const int64_t largest = skip < 0 ? kLargest : 30000;
  const auto plan = plan_all(seed, skip < 0 ? 150 : 30, world_size, largest);
  const auto prepared = [&](Rank& rank) {
    install(rank, loops, skip);
    return Exchanger(rank, skip);
  };
  on_all_ranks(world_size, seconds(60),
               [&](Rank& rank) { prepared(rank).carry_out(plan, seed, true, true); });
  on_all_ranks(world_size, seconds(60), [&](Rank& rank) {
    Exchanger exchanger = prepared(rank);
    std::thread other([&] { exchanger.carry_out(plan, seed, false, true); });
    exchanger.carry_out(plan, seed, true, false);
    other.join();
  });
}

}  // namespace

namespace native_test {

void check_exchanges(const char* file, unsigned seed, int skip) {
  int world_size = 0;
  const std::vector<Loops> loops = read_loops(file, &world_size);
  exchange_random(loops, world_size, seed, skip);
  if (skip < 0 && world_size > 1) check_exchange_faults(loops, world_size);
}

}  // namespace native_test
