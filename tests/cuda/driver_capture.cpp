// Captures: commands are recorded by lane, with what each lane comes after, and run at replay,
// where nothing but these edges orders them.
#include <algorithm>
#include <map>
#include <numeric>

#include "driver_model.h"

namespace simulated {

namespace {

std::mutex mutex;
std::map<int, Graph*> captures;  // under way, by number

Graph* find(int number) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = captures.find(number);
  return found == captures.end() ? nullptr : found->second;
}

// How much of each lane a lane comes after, now.
std::vector<int>& reached(Graph& graph, int lane) {
  auto& those = graph.reached[lane];
  those.resize(graph.origins.size());
  return those;
}

void join(std::vector<int>& these, const std::vector<int>& others) {
  these.resize(std::max(these.size(), others.size()));
  for (size_t i = 0; i < others.size(); ++i) these[i] = std::max(these[i], others[i]);
}

void add_lane(Graph* graph, SimStream* stream) {
  stream->capture = graph;
  stream->lane = static_cast<int>(graph->origins.size());
  graph->origins.push_back(stream);
  graph->lengths.push_back(0);
  graph->reached.emplace_back();
}

}  // namespace

bool capturing_anywhere() {
  std::lock_guard<std::mutex> lock(mutex);
  return !captures.empty();
}

Result capture_begin(SimStream* stream) {
  if (stream->capture != nullptr) return kCaptureUnmatched;
  static int numbers = 0;
  std::lock_guard<std::mutex> lock(mutex);
  auto* graph = new Graph;
  graph->number = ++numbers;
  captures[graph->number] = graph;
  add_lane(graph, stream);
  return 0;
}

Result capture_end(SimStream* stream, bool partial, Graph** result) {
  Graph* graph = stream->capture;
  if (graph == nullptr || stream->lane != 0) return kCaptureUnmatched;
  {
    std::lock_guard<std::mutex> lock(mutex);
    captures.erase(graph->number);
  }
  for (SimStream* lane : graph->origins) lane->capture = nullptr;
  for (size_t lane = 1; lane < graph->origins.size() && graph->broken == 0; ++lane)
    if (!partial && reached(*graph, 0)[lane] < graph->lengths[lane])
      graph->broken = kCaptureUnjoined;
  *result = graph->broken == 0 ? graph : nullptr;
  return graph->broken;
}

void capture_command(SimStream* stream, Command command) {
  Graph& graph = *stream->capture;
  graph.nodes.push_back({Graph::Node::kCommand, stream->lane, std::move(command), 0});
  reached(graph, stream->lane)[stream->lane] = ++graph.lengths[stream->lane];
}

Result capture_record(SimStream* stream, SimEvent* event) {
  Graph& graph = *stream->capture;
  std::lock_guard<std::mutex> lock(event->mutex);
  event->graph = graph.number;
  event->record = static_cast<int>(graph.records.size());
  graph.records.push_back(reached(graph, stream->lane));
  graph.nodes.push_back({Graph::Node::kRecord, stream->lane, {}, event->record});
  return 0;
}

Result capture_wait(SimStream* stream, SimEvent* event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  Graph* graph = find(event->graph);
  if (graph == nullptr && stream->capture == nullptr) return kCapturedEvent;
  if (graph == nullptr || (stream->capture != nullptr && stream->capture != graph)) {
    stream->capture->broken = kCaptureIsolation;
    return kCaptureIsolation;
  }
  if (stream->capture == nullptr) add_lane(graph, stream);
  join(reached(*graph, stream->lane), graph->records[event->record]);
  graph->nodes.push_back({Graph::Node::kWait, stream->lane, {}, event->record});
  return 0;
}

Result refuse_in_capture(SimStream* stream) {
  if (stream->capture == nullptr) return 0;
  stream->capture->broken = kCaptureInvalidated;
  return kCaptureUnsupported;
}

namespace {

// An order in which the driver may start the nodes of a graph: any that keeps its edges. Now it
// goes through the lanes in turns, now it follows one of them as far as that goes.
std::vector<const Graph::Node*> any_order(const Graph& graph) {
  static std::mt19937 random(std::random_device{}());
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::deque<const Graph::Node*>> lanes(graph.origins.size());
  for (const Graph::Node& node : graph.nodes) lanes[node.lane].push_back(&node);
  std::vector<bool> recorded(graph.records.size());
  std::vector<size_t> preferred(lanes.size());
  std::iota(preferred.begin(), preferred.end(), 0);
  const unsigned change = 1u << random() % 6;  // after how many nodes, on average
  std::vector<const Graph::Node*> order;
  while (order.size() < graph.nodes.size()) {
    if (random() % change == 0 || order.empty())
      std::shuffle(preferred.begin(), preferred.end(), random);
    const auto lane = std::find_if(preferred.begin(), preferred.end(), [&](size_t i) {
      return !lanes[i].empty() &&
             (lanes[i].front()->type != Graph::Node::kWait || recorded[lanes[i].front()->record]);
    });
    const Graph::Node* node = lanes[*lane].front();
    lanes[*lane].pop_front();
    if (node->type == Graph::Node::kRecord) recorded[node->record] = true;
    order.push_back(node);
  }
  return order;
}

}  // namespace

Result replay(Graph* graph, SimStream* stream, bool on_captured_streams) {
  if (stream->capture != nullptr) return kCaptureUnsupported;  // of the driver's, not of CUDA's
  while (!on_captured_streams && graph->streams.size() + 1 < graph->origins.size())
    graph->streams.push_back(new SimStream(stream->device, true));
  std::vector<std::shared_ptr<Fired>> fired(graph->records.size());
  auto await = [](const std::shared_ptr<Fired>& event) {
    Command command{"an event of a graph", Kind::kWait};
    command.edge = true;
    command.ready = [event] { return event->value.load(); };
    command.about = [] { return "an event of a graph"; };
    return command;
  };
  auto fire = [](const std::shared_ptr<Fired>& event) {
    Command command{"an event of a graph"};
    command.edge = true;
    command.run = [event] { event->value = true; };
    return command;
  };
  if (graph->last_ended != nullptr) stream->push(await(graph->last_ended));
  for (const Graph::Node* each : any_order(*graph)) {
    const Graph::Node& node = *each;
    SimStream* lane = node.lane == 0        ? stream
                      : on_captured_streams ? graph->origins[node.lane]
                                            : graph->streams[node.lane - 1];
    if (node.type == Graph::Node::kCommand) {
      lane->push(node.command);
    } else if (node.type == Graph::Node::kRecord) {
      fired[node.record] = std::make_shared<Fired>();
      lane->push(fire(fired[node.record]));
    } else {
      lane->push(await(fired[node.record]));
    }
  }
  graph->last_ended = std::make_shared<Fired>();
  stream->push(fire(graph->last_ended));
  return 0;
}

void graph_destroy(Graph* graph) {
  for (SimStream* stream : graph->streams) stream->destroy();
  delete graph;
}

}  // namespace simulated
