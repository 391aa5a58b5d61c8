"""Keys: what one is, giving it up, and exchanging it for a short-lived token."""

from fastapi import APIRouter, Request, Response

from twinkle.server.http.requests import PREFIX, gateway_of, json_response, key_of

router = APIRouter(prefix=PREFIX)


@router.post("/auth/token")
async def token(request: Request) -> Response:
    return json_response({"jwt": await gateway_of(request).identity.issue_token(key_of(request))})


@router.get("/auth/apikey/me")
async def this_key(request: Request) -> Response:
    key = await gateway_of(request).identity.describe(key_of(request))
    owner = {"org_details": {"name": key.tenant_id}, "user_details": {"email": ""}}
    note = "auth.mode is open: any key is a tenant of its own" if key.key_id is None else key.key_id
    return json_response({"key_id": key.number, "name": key.name, "note": note, "details": owner})


@router.delete("/auth/apikey/me")
async def revoke_this_key(request: Request) -> Response:
    await gateway_of(request).identity.revoke(key_of(request))
    return json_response({})
