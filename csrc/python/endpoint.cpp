// The raw road: iroh's endpoints and streams without groups or collectives. For benchmarks (how fast is the road
// itself?) and for tests that play a hostile peer.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "iroh/endpoint.hpp"
#include "link/frame.hpp"
#include "python/module.hpp"
#include "transport/membership.hpp"

namespace py = pybind11;

namespace torch_iroh::python {
namespace {

TimePoint in_seconds(double seconds) {
  return after(Clock::now(), std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

// Counts what many completions did, and lets one thread wait for the sum.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t bytes = 0;
  std::optional<Error> failed;

  void add(std::uint64_t count) {
    const std::lock_guard lock(mutex);
    bytes += count;
    changed.notify_all();
  }
  void fail(const Error& error) {
    const std::lock_guard lock(mutex);
    if (!failed) failed = error;
    changed.notify_all();
  }
  void wait_for(std::uint64_t total, TimePoint by) {
    std::unique_lock lock(mutex);
    const bool done = changed.wait_until(lock, by, [&] { return bytes >= total || failed; });
    if (bytes >= total) return;
    if (failed) throw *failed;
    if (!done) throw Error(ErrorKind::timeout, "the bytes did not arrive in time");
  }
};

// Keeps one write after the other in flight on its stream, until its share is written.
struct Writer : std::enable_shared_from_this<Writer> {
  Writer(iroh::SendStream opened, std::size_t piece, std::uint64_t share, std::shared_ptr<Progress> progress)
      : stream(std::move(opened)), data(piece), left(share), written(std::move(progress)) {}
  void next() {
    const std::size_t count = std::min<std::uint64_t>(left, data.size());
    if (count == 0) return;
    left -= count;
    stream.write_all(std::span(data).first(count)).then([self = shared_from_this(), count](Result<Nothing> result) {
      if (!result.ok()) return self->written->fail(result.error());
      self->written->add(count);
      self->next();
    });
  }
  iroh::SendStream stream;
  std::vector<std::byte> data;
  std::uint64_t left;
  std::shared_ptr<Progress> written;
};

struct Reader : std::enable_shared_from_this<Reader> {
  Reader(iroh::RecvStream accepted, std::size_t piece_bytes, std::uint64_t share, std::shared_ptr<Progress> progress)
      : stream(std::move(accepted)), piece(piece_bytes), left(share), read(std::move(progress)) {}
  void next() {
    const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, piece));
    if (count == 0) return;
    left -= count;
    stream.read_exact(count).then([self = shared_from_this()](Result<Payload> result) {
      if (!result.ok()) return self->read->fail(result.error());
      const std::size_t size = result.value().size();
      result.value() = {};
      self->read->add(size);
      self->next();
    });
  }
  iroh::RecvStream stream;
  std::size_t piece;
  std::uint64_t left;
  std::shared_ptr<Progress> read;
};

class RawConnection {
 public:
  explicit RawConnection(iroh::Connection connection) : connection_(std::move(connection)) {}

  // Sends and receives `send` and `receive` bytes at once, each spread over `streams`; returns when both are done here.
  void transfer(std::uint64_t send, std::uint64_t receive, std::size_t piece, int streams, double timeout) {
    const TimePoint by = in_seconds(timeout);
    auto written = std::make_shared<Progress>();
    auto read = std::make_shared<Progress>();
    const auto lanes = static_cast<std::uint64_t>(streams);
    for (std::uint64_t i = 0; i < lanes && send > 0; ++i) {
      const std::uint64_t share = send / lanes + (i < send % lanes ? 1 : 0);
      std::make_shared<Writer>(connection_.open_uni().get(by), piece, share, written)->next();
    }
    for (std::uint64_t i = 0; i < lanes && receive > 0; ++i) {
      // Streams arrive in any order, so all shares but the last are equal only if the total divides.
      std::make_shared<Reader>(connection_.accept_uni().get(by), piece, receive / lanes, read)->next();
    }
    written->wait_for(send, by);
    read->wait_for(receive, by);
  }

  // One stream with these bytes on it, left open.
  void write(const py::bytes& bytes, double timeout) {
    const std::string_view view = bytes;
    const auto data = std::as_bytes(std::span(view.data(), view.size()));
    const py::gil_scoped_release release;
    kept_.push_back(connection_.open_uni().get(in_seconds(timeout)));
    kept_.back().write_all(data).get(in_seconds(timeout));
  }

  std::string wait_closed(double timeout) { return connection_.closed().get(in_seconds(timeout)); }
  void close() { connection_.close(0, "done"); }
  std::string remote_id() const { return iroh::to_hex(connection_.remote_id()); }

  // What the peer wrote on one stream that it opened and finished: at most `limit` bytes.
  py::bytes read(std::uint32_t limit, double timeout) {
    std::string all;
    {
      const py::gil_scoped_release release;
      const TimePoint by = in_seconds(timeout);
      auto stream = connection_.accept_uni().get(by);
      while (all.size() < limit) {
        const Payload piece = stream.read(limit - static_cast<std::uint32_t>(all.size())).get(by);
        if (piece.size() == 0) break;
        all.append(reinterpret_cast<const char*>(piece.bytes().data()), piece.size());
      }
    }
    return {all.data(), all.size()};
  }

  // (address or relay URL, is it a relay, is it the one in use, round trip in ms) of every open path.
  std::vector<std::tuple<std::string, bool, bool, std::uint64_t>> paths() const {
    std::vector<std::tuple<std::string, bool, bool, std::uint64_t>> all;
    for (const iroh::Path& path : connection_.paths()) {
      all.emplace_back(path.remote_addr, path.relay, path.selected, path.rtt_ms);
    }
    return all;
  }

 private:
  iroh::Connection connection_;
  std::vector<iroh::SendStream> kept_;
};

class RawEndpoint {
 public:
  using Relays = std::vector<std::pair<std::string, std::optional<std::string>>>;

  RawEndpoint(const std::string& bind, const std::string& alpn, const Relays& relays,
              const std::optional<std::string>& secret_key)
      : alpn_(alpn) {
    iroh::EndpointOptions options;
    options.alpns = {alpn};
    options.bind_addr = bind;
    for (const auto& [url, token] : relays) options.relays.push_back({url, token});
    if (secret_key) options.secret_key = iroh::secret_key_of(*secret_key);
    endpoint_ = iroh::Endpoint::bind(options).get(in_seconds(10));
  }

  std::string id() const { return iroh::to_hex(endpoint_.id()); }
  std::vector<std::string> addresses() const { return endpoint_.addr().direct; }
  std::optional<std::string> relay_url() const { return endpoint_.addr().relay_url; }
  void online(double timeout) { endpoint_.online().get(in_seconds(timeout)); }
  void add_external_addr(const std::string& addr, double timeout) {
    if (!iroh::is_socket_address(addr)) throw Error(ErrorKind::invalid, "not an address: " + addr);
    endpoint_.add_external_addr(addr).get(in_seconds(timeout));
  }

  RawConnection connect(const std::string& id, const std::vector<std::string>& addresses, double timeout,
                        const std::optional<std::string>& relay_url) {
    iroh::EndpointAddr addr;
    const auto parsed = iroh::id_from_hex(id);
    if (!parsed) throw Error(ErrorKind::invalid, "not an endpoint id: " + id);
    addr.id = *parsed;
    addr.direct = addresses;
    addr.relay_url = relay_url;
    return RawConnection(endpoint_.connect(addr, alpn_).get(in_seconds(timeout)));
  }

  RawConnection accept(double timeout) {
    const TimePoint by = in_seconds(timeout);
    auto incoming = endpoint_.accept_next().get(by);
    if (!incoming) throw Error(ErrorKind::aborted, "the endpoint is closed");
    return RawConnection(incoming->accept().get(by).handshake().get(by));
  }

  void close() { endpoint_.close().get(in_seconds(5)); }

  // The store entry with which this endpoint poses as a rank.
  py::bytes record(std::uint32_t chunk_bytes, const std::string& members) const {
    transport::Record record;
    record.chunk_bytes = chunk_bytes;
    record.members = members;
    record.host = "raw";
    record.addr = endpoint_.addr();
    const auto bytes = transport::encode(record);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::string alpn_;
  iroh::Endpoint endpoint_;
};

}  // namespace

void bind_endpoint(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<RawConnection>(module, "RawConnection")
      .def("transfer", &RawConnection::transfer, py::arg("send"), py::arg("receive"), py::arg("piece"),
           py::arg("streams"), py::arg("timeout"), Release())
      .def("write", &RawConnection::write, py::arg("bytes"), py::arg("timeout") = 10.0)
      .def("wait_closed", &RawConnection::wait_closed, py::arg("timeout"), Release())
      .def("close", &RawConnection::close, Release())
      .def("remote_id", &RawConnection::remote_id)
      .def("read", &RawConnection::read, py::arg("limit"), py::arg("timeout") = 10.0)
      .def("paths", &RawConnection::paths);
  py::class_<RawEndpoint>(module, "RawEndpoint")
      .def(py::init([](const std::string& bind, const std::string& alpn, const RawEndpoint::Relays& relays,
                       const std::optional<py::bytes>& secret_key) {
             std::optional<std::string> key;
             if (secret_key) key = std::string(*secret_key);
             const py::gil_scoped_release release;
             return std::make_unique<RawEndpoint>(bind, alpn, relays, key);
           }),
           py::arg("bind"), py::arg("alpn"), py::arg("relays") = RawEndpoint::Relays{},
           py::arg("secret_key") = py::none())
      .def("id", &RawEndpoint::id)
      .def("addresses", &RawEndpoint::addresses)
      .def("connect", &RawEndpoint::connect, py::arg("id"), py::arg("addresses"), py::arg("timeout") = 10.0,
           py::arg("relay_url") = py::none(), Release())
      .def("relay_url", &RawEndpoint::relay_url)
      .def("online", &RawEndpoint::online, py::arg("timeout") = 10.0, Release())
      .def("add_external_addr", &RawEndpoint::add_external_addr, py::arg("addr"), py::arg("timeout") = 5.0, Release())
      .def("accept", &RawEndpoint::accept, py::arg("timeout") = 10.0, Release())
      .def("record", &RawEndpoint::record, py::arg("chunk_bytes"), py::arg("members"))
      .def("close", &RawEndpoint::close, Release());
  module.attr("ALPN") = link::kAlpn;
  module.def(
      "public_key",
      [](const py::bytes& secret_key) {
        return iroh::to_hex(iroh::public_key(iroh::secret_key_of(std::string(secret_key))));
      },
      py::arg("secret_key"), "The endpoint id, in hex, of a secret key of 32 bytes.");
}

}  // namespace torch_iroh::python
