-- One request, as the environment describes it, sent over and over; the figures as one line of JSON at the end.
local function read(name)
  local file = assert(io.open(os.getenv(name), "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

wrk.method = "POST"
wrk.body = read("WRK_BODY")
wrk.headers["Content-Type"] = os.getenv("WRK_CONTENT_TYPE")
for name, value in os.getenv("WRK_HEADERS"):gmatch("([^=\n]+)=([^\n]*)") do
  wrk.headers[name] = value
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\nRESULT {"requests": %d, "seconds": %f, "p50_us": %d, "p99_us": %d, "bytes": %d, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99), summary.bytes,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
