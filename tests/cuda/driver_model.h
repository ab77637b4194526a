// The simulated device behind driver.cpp: streams, events, captures, and whose memory is whose.
//
// A stream is a thread with a queue. Commands begin in the order in which they were issued to their
// stream, and nothing else is promised: streams run at their own pace (with random delays), and the
// `Settings` take away what only some drivers or launchers promise.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.h"

namespace simulated {

using symm_cp::driver::Address;
using symm_cp::driver::Result;

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidHandle = 400,
                 kNotReady = 600, kNotSupported = 801, kCaptureUnsupported = 900,
                 kCaptureInvalidated = 901, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
                 kCaptureIsolation = 905, kCapturedEvent = 907;

// What the machine is like. Change it only while no stream has work.
struct Settings {
  std::atomic<int> delay_us{0};
  std::atomic<int> version{13010};            // as cuDriverGetVersion
  std::atomic<int> patience_ms{30000};        // for a wait; then the process aborts with a report
  std::atomic<bool> counts_deadlocks{false};  // instead of aborting
  std::atomic<bool> one_queue{false};         // one FIFO for all streams
  std::atomic<bool> multiprocessors{false};   // a polling kernel leaves no room for others
  std::atomic<bool> contexts{false};          // threads begin without a current context
  std::atomic<int> faults[4]{};               // by Faulty: what goes wrong with it
};
Settings& settings();

enum Faulty { kFaultyWrite, kFaultyWait, kFaultyBatch, kFaultyPeerCopy };
// kReorders, of waits: they end when they should, but copies behind them need not wait.
enum Fault { kWorks, kRefuses, kHangs, kIgnored, kReorders };
bool faulty(Faulty what, Fault how);

// What a command needs from the device besides its turn.
// What the host alone does (kHost) takes no place in the queue that streams may share.
enum class Kind { kHost, kWork, kWait, kKernel, kPollingKernel, kLocalCopy };

struct Command {
  const char* name = "";
  Kind kind = Kind::kWork;
  std::function<void()> run;
  std::function<bool()> ready;         // of a wait
  std::function<std::string()> about;  // of a wait, for reports
  bool for_signal = false;             // it waits for one, not for an event
  bool writes_signal = false;          // after all before it; what is behind it need not wait
  bool edge = false;                   // an end of a graph's edge, which orders but does no work
  bool at_once = false;                // after the one before it: both are of one call
  size_t carried = 0;                  // bytes between ranks
  uint64_t ticket = 0;                 // its turn, where all streams share one queue
};

struct Fired {
  std::atomic<bool> value{false};
};

struct Graph;

class SimStream {
 public:
  // Without a thread of its own a stream is served by whoever calls `serve`.
  SimStream(int device, bool own_thread);
  // After its end the host's commands run at once: what it leaves is freed later.
  void push(Command command);
  void drain();
  bool idle();
  // Ends the stream once it has no work left, as cuStreamDestroy.
  void destroy();
  void serve();
  std::string head();  // for reports
  // Carries out the copies that only waits for signals hold back; for whoever serves it.
  void run_ahead();

  const int device;
  Graph* capture = nullptr;  // that commands are recorded in, and as which of its lanes
  int lane = 0;

 private:
  void execute(Command& command);
  void await(const std::function<bool()>& ready, std::string what, const char* name);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> queue_;
  int64_t pushed_ = 0, done_ = 0, ahead_ = 0;
  bool destroyed_ = false, ended_ = false;
  std::string waiting_for_;
  std::mt19937 random_;
};

struct SimEvent {
  std::mutex mutex;
  std::shared_ptr<Fired> last;  // null: never recorded
  int device = 0;
  // Of a record that was captured: the graph's number, or 0.
  int graph = 0;
  int record = 0;
};

// The stream that the calling thread serves, or null.
SimStream* served_here();
// All streams of the process; for draining and reports.
std::vector<SimStream*> all_streams();
// Returns when everything issued so far has ended, in all streams.
void drain_all();
// Writes what every stream waits for, and aborts; or counts it, and the wait is over.
void report_deadlock(const char* what);
extern std::atomic<int> deadlocks;

// --- capture (driver_capture.cpp)

struct Graph {
  struct Node {
    enum Type { kCommand, kRecord, kWait } type;
    int lane;
    Command command;
    int record;  // of an event
  };
  int number = 0;
  std::vector<Node> nodes;
  std::vector<SimStream*> origins;        // the streams that are captured, by lane
  std::vector<int> lengths;               // commands in each lane
  std::vector<std::vector<int>> reached;  // by lane: how much of each it comes after
  std::vector<std::vector<int>> records;  // by record: likewise
  Result broken = 0;
  std::vector<SimStream*> streams;    // of replays, for lanes but the first
  std::shared_ptr<Fired> last_ended;  // replays of one graph follow each other
};

bool capturing_anywhere();
Result capture_begin(SimStream* stream);
// `partial`: the stream need not wait for all that was captured; what follows the replay does.
Result capture_end(SimStream* stream, bool partial, Graph** graph);
void capture_command(SimStream* stream, Command command);
Result capture_record(SimStream* stream, SimEvent* event);
Result capture_wait(SimStream* stream, SimEvent* event);
// The lanes but the first run on the streams that were captured, or on streams of the graph's own.
Result replay(Graph* graph, SimStream* stream, bool on_captured_streams);
void graph_destroy(Graph* graph);
// An operation that a stream in capture does not allow: the capture is lost.
Result refuse_in_capture(SimStream* stream);

// --- memory (driver_memory.cpp)

enum class Owner { kOrdinary, kOwn, kPeer };  // not symmetric memory, this rank's, a peer's
Owner owner_of(Address address);
// Surely: another mapping may have taken the place of one within a moment.
Owner owner_now(Address address);
// Keeps what commands wrote last, for reports about memory that was written when it was free.
void note_write(Address to, size_t bytes, const char* name);
std::string last_write(Address address, size_t bytes);

}  // namespace simulated
