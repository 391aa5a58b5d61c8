import time
from concurrent.futures import ThreadPoolExecutor
from running import *
from test_recovery import train, results, undisturbed
def test_x(own_server):
    t0=time.monotonic()
    def say(x): print(round(time.monotonic()-t0,2), x, flush=True)
    server = own_server(**{"pass": 0.5, "snapshot": 60.0})
    say("started")
    tenant = Tenant(server.url, "tml-drain")
    model = tenant.model()
    requests = train(tenant, model, "fb os")
    delivered = results(tenant, requests)
    running = train(tenant, model, "fb", first=3)
    say("running")
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(Tenant(server.url, "tml-drain").poll, running[0])
        time.sleep(0.2)
        say("stop")
        assert server.stop() == 0
        say("stopped")
        say(poll.result().status_code)
    server.tuning["pass"] = 0.0
    server.start()
    say("restarted")
    assert results(tenant, requests) == delivered
    say("results")
    r=results(tenant, running)
    say("r")
    undisturbed(tenant, "fb os fb")[2:]
    say("u")
