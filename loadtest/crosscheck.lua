-- The saturation scenario's requests for wrk: the generator is checked once against a program that is not ours.
-- Transfers between two different random users out of 10,000, each under a key of its own. Needs users with money.

local threads = 0
function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init()
  run = os.time()
  math.randomseed(run * 16 + number)
  count = 0
  wrk.headers["Authorization"] = "Bearer " .. os.getenv("DAYBOOK_ADMIN_TOKEN")
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  count = count + 1
  local from = math.random(1, 10000)
  local to = (from + math.random(0, 9998)) % 10000 + 1
  wrk.headers["Idempotency-Key"] = "wrk-" .. run .. "-" .. number .. "-" .. count
  return wrk.format("POST", "/v1/events", nil,
    '{"type":"transfer","schema":"1.7","subject":"u-' .. from .. '","data":{"to":"u-' .. to ..
    '","asset":"EUR/2","amount":"' .. math.random(1, 9) .. '"}}')
end
